"""The other ranks' processes, owned by rank 0: it starts them, watches for their end, and leaves none behind.

STARTED -> SERVING -> closed          each rank ends because its channel is closed
    |         |
    +---------+----> LOST             one ended by itself or is stuck: all are killed, and the reason is reported
"""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from devices.table import traits_of
from engine.ranks.marks import Marks, make_marks
from engine.ranks.message_kinds import RankMessageKind
from engine.ranks.setup import RankSetup
from processes.child import ChildProcess
from processes.rank_channel import Channel, ChannelClosed, Message
from processes.rank_payloads import to_json, unpack_error
from telemetry.logs import EventLogger
from wire.errors import InstanceLost, InternalError, PdserveError
from wire.kv_layout import Rank

_log = EventLogger("engine")

OnLost = Callable[[PdserveError], None]
"""Called once, from any thread, when a serving rank is lost: the instance has to end."""

PROGRAM = "engine.ranks.process"
"""The module of a rank that only computes; rank 0 moves its KV."""

_SEND_S = 10.0
_START_S = 30.0
_VERDICT_S = 1.0  # from a broken connection to the report that the rank's process ended
_ENDING_S = 30.0  # the same if the kernel shows that the process is exiting: this is slow on a starved machine
_LEAVE_S = 2.0
_KILLED_S = 5.0
_POLL_S = 0.5
_PF_EXITING = 0x4  # a flag of a process in the kernel (linux/sched.h)
_STOPPED = "is stopped by a signal"


@dataclass(frozen=True, slots=True)
class _Child:
    setup: RankSetup
    process: ChildProcess
    channel: Channel[RankMessageKind]
    ended: threading.Event

    def __str__(self) -> str:
        return f"{self.setup.rank} (pid {self.process.pid})"


class Team:
    """Owns the child processes, their channels, and the thread that starts and watches them."""

    def __init__(self, setups: Sequence[RankSetup], on_lost: OnLost, program: str = PROGRAM) -> None:
        """Start a process with the module `program` for each setup; the first is rank 1.

        Raises InternalError if they cannot be started.
        """
        self._on_lost, self._num_ranks, self._program = on_lost, len(setups) + 1, program
        self._children: list[_Child] = []
        self._started = threading.Event()
        self._serving = self._closing = False
        self._error: PdserveError | None = None
        self._lost = threading.Event()
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._reasons: dict[int, str] = {}  # by rank, why it failed
        self._fault: Exception | None = None
        marks = make_marks(self._num_ranks)
        self.marks, self._marks_fd = Marks(marks, self._num_ranks), marks
        self._store_fd = os.memfd_create("pdserve-store", os.MFD_CLOEXEC)
        # The kernel kills a child when the thread that started it ends, so that thread has to outlive them.
        self._thread = threading.Thread(target=self._watch, args=(tuple(setups),), name="ranks", daemon=True)
        self._thread.start()
        if not self._started.wait(_START_S) or self._fault is not None:
            self.close()
            raise InternalError(f"the ranks could not be started: {self._fault or 'no answer'}")

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of ranks 1, 2 and so on."""
        return tuple(child.process.pid for child in self._children)

    def receive(self, rank: int, kind: RankMessageKind, timeout_s: float) -> Message[RankMessageKind]:
        """Return a rank's next message, of this kind. Raises its error, or InstanceLost if it ended or is late."""
        child = self._children[rank - 1]
        self._wait(child, kind, timeout_s)
        try:
            with self._reading:
                message = child.channel.receive(_SEND_S)
        except TimeoutError as error:
            raise self._fail(f"{child} stopped in the middle of a message, while {kind.name} was expected") from error
        except (ChannelClosed, ValueError) as error:
            raise self.explain(str(error)) from error
        if message.kind == RankMessageKind.FAILED:
            raise _rank_failure(message, f"{child}: ")
        if message.kind != kind:
            raise self._fail(f"{child} sent {message.kind.name} where {kind.name} was expected")
        return message

    def _wait(self, child: _Child, kind: RankMessageKind, timeout_s: float) -> None:
        """Wait until a rank sends a message or ends. Raises InstanceLost if it is late, or stopped for `step_s`.

        Weights may take half an hour to load, but a stopped process loads nothing.
        """
        began = going = time.monotonic()
        while not child.channel.has_more(min(_POLL_S, timeout_s)):
            now = time.monotonic()
            if now - began >= timeout_s:
                raise self._fail(f"{child} sent nothing for {timeout_s:g} s, while {kind.name} was expected")
            if _state(child) != _STOPPED:
                going = now
            elif now - going >= child.setup.step_s:
                stopped = f"{child} {_STOPPED}, and was for {child.setup.step_s:g} s"
                raise self._fail(f"{stopped}, while {kind.name} was expected")

    def send(self, rank: int, kind: RankMessageKind, payload: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        """Send one rank a message. Raises InstanceLost."""
        child = self._children[rank - 1]
        try:
            child.channel.send(kind, payload, timeout_s=_SEND_S, fds=fds)
        except (ChannelClosed, TimeoutError) as error:
            raise self.explain(f"{child}: {error}") from error

    def send_all(self, kind: RankMessageKind, payload: bytes = b"") -> None:
        """Send all ranks the same message. Raises InstanceLost."""
        for rank in range(1, self._num_ranks):
            self.send(rank, kind, payload)

    def connect(self, way: str) -> int:
        """Send all ranks the way to connect to each other; return the descriptor of the store for rank 0."""
        for rank in range(1, self._num_ranks):
            self.send(rank, RankMessageKind.CONNECT, way.encode(), (self._store_fd, self._marks_fd))
        return self._store_fd

    def serve(self) -> None:
        """Report the loss of a rank to `on_lost` from now on. Raises InstanceLost if one is lost already."""
        with self._lock:
            self._serving = True
            if self._error is not None:
                raise self._error

    def explain(self, what: str) -> PdserveError:
        """Return why the ranks no longer answer: one has ended or is stuck. All are lost in any case."""
        self._await_report()
        if self._error is not None:
            return self._error
        for child in self._children:
            if reason := self._failure_reason(child, 0.0):  # its process may take a while to end
                return self._fail(f"{child} failed{reason}")
        slowest = self.marks.slowest()
        if slowest == (0,):
            return self._fail(f"{self._rank_0()}: {what}")
        late = [self._children[rank - 1] for rank in slowest if rank > 0] or self._children
        return self._fail(f"{', '.join(f'{child} {_state(child)}' for child in late)}: {what}")

    def explain_own(self, what: str) -> PdserveError:
        """Return why rank 0 cannot continue: `what`, unless another rank ended. All are lost in any case."""
        self._await_report()
        return self._fail(f"{self._rank_0()} {what}")

    def close(self) -> None:
        """End the ranks and wait for them; kill those that do not end. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        for child in self._children:
            child.channel.close()
        deadline = time.monotonic() + _LEAVE_S
        for child in self._children:
            if not child.ended.wait(max(0.0, deadline - time.monotonic())):
                _log.warning("rank_killed", rank=child.setup.number, pid=child.process.pid, waited_s=_LEAVE_S)
                child.process.kill()
        self._thread.join(_KILLED_S)
        for fd in (self._store_fd, self._marks_fd):
            os.close(fd)

    def _await_report(self) -> None:
        """Wait a moment for the report that a process ended; longer if one is exiting."""
        if not self._lost.wait(_VERDICT_S) and any(map(_is_ending, self._children)):
            self._lost.wait(_ENDING_S)

    def _rank_0(self) -> str:
        return f"{Rank(0, self._num_ranks)} (pid {os.getpid()})"

    def _watch(self, setups: Sequence[RankSetup]) -> None:
        try:
            self._children.extend(_start(setup, self._program) for setup in setups)
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame: the constructor raises it
            self._fault = error
        self._started.set()
        poll, running = select.poll(), {os.pidfd_open(child.process.pid): child for child in self._children}
        for fd in running:
            poll.register(fd, select.POLLIN)
        while running:
            for fd, _ in poll.poll():
                poll.unregister(fd)
                os.close(fd)
                self._wait_for_end(running.pop(fd))

    def _wait_for_end(self, child: _Child) -> None:
        how = _exit_reason(child.process.wait(None))
        reason = self._failure_reason(child, _VERDICT_S)
        if not self._closing:
            self._fail(f"{child} {how}{reason}")
        child.ended.set()

    def _failure_reason(self, child: _Child, timeout_s: float) -> str:
        """Return the error that a serving rank sent before its end. During loading, `receive` reads it."""
        if not self._serving or self._closing:
            return ""
        number = child.setup.number
        with self._reading, contextlib.suppress(ChannelClosed, TimeoutError, ValueError):
            if number not in self._reasons:
                message = child.channel.receive(timeout_s)
                self._reasons[number] = f": {_rank_failure(message)}" if message.kind == RankMessageKind.FAILED else ""
        return self._reasons.get(number, "")

    def _fail(self, what: str) -> PdserveError:
        """Keep the first reason, kill all ranks, report the loss to the owner."""
        with self._lock:
            if self._error is not None:
                return self._error
            if self._closing:  # close() ends them
                return InstanceLost(f"{what}; this instance is shutting down")
            self._error = InstanceLost(f"{what}; without it this instance cannot continue")
            serving = self._serving
        _log.error("rank_lost", error=self._error)
        for child in self._children:
            child.process.kill()
        self.marks.abort()
        self._lost.set()
        if serving:
            self._on_lost(self._error)
        return self._error


def _start(setup: RankSetup, program: str) -> _Child:
    process = ChildProcess(program, environ=_environ(setup))
    channel = Channel(process.connection, RankMessageKind)
    with contextlib.suppress(ChannelClosed):  # it ended already: _reap reports how
        channel.send(RankMessageKind.SETUP, to_json(setup), timeout_s=_SEND_S)
    return _Child(setup, process, channel, threading.Event())


def _environ(setup: RankSetup) -> dict[str, str]:
    """Return the environment of a rank's process: this one's, with only its own device visible."""
    variable = traits_of(setup.device).visible_variable
    if variable is None or setup.visible is None:
        return dict(os.environ)
    return {**os.environ, variable: setup.visible}


def _exit_reason(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"


def _state(child: _Child) -> str:
    """Return the state of a running process."""
    fields = _stat(child)
    return _STOPPED if fields and fields[0] in "Tt" else "is stuck"


def _is_ending(child: _Child) -> bool:
    fields = _stat(child)
    return not fields or bool(int(fields[6]) & _PF_EXITING)


def _stat(child: _Child) -> list[str]:
    """Return the kernel's fields of a process from its state on, none if it is gone."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{child.process.pid}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()
    return []


def _rank_failure(message: Message[RankMessageKind], before: str = "") -> PdserveError:
    return unpack_error(message.payload, before) or InternalError(f"{before}failed and gave no reason")
