"""NCCL as far as a CPU can show it: gloo underneath, and every rule of NCCL and of torch around it that we know.

One thread at a time issues operations on a device, whichever of its existing communicators they are for; a link's first
operation creates its communicator, and may be issued meanwhile (NCCL orders no threads by default: enqueue.cc,
getImplicitOrder).
The two ends of a communicator are on two devices. Both create it at the same time, by their first operation: that waits
inside the call, for one second more than TORCH_NCCL_NONBLOCKING_TIMEOUT, and an abort waits for it
(ProcessGroupNCCL.cpp: pointToPoint calls initNCCLComm; NCCLUtils.cpp: NCCLComm::getNcclComm and waitReady hold the
mutex that abort takes).
An operation has one tensor, which is contiguous, in the device's memory, of a supported dtype, and not empty.
A receive has as many bytes as its send, and the same dtype.
If a peer dies before it has joined, that call fails (NCCLUtils.cpp: waitReady raises the communicator's error).
An operation ends late, only after the earlier ones of its communicator, and holds its memory until then: that of a send
must not change before, that of a receive changes only then (WorkNCCL::isCompleted queries the event that pointToPoint
recorded last).
Its own stream waits for the issuing thread's current stream, which is not the default one that computes (syncStream).
A wait without a timeout returns at once, and reports no failure; one with a timeout raises.
Only operations that have ended are waited for: otherwise the thread's current stream would wait too (WorkNCCL::wait
calls synchronizeStream first).
An abort ends what the device runs of the communicator, and what it would run of it later: kernels poll the flag that
ncclCommAbort sets first (NCCL's init.cc: setCommAbortFlags; device/primitives.h: checkAbort).
A failure ends the process, unless torch was configured to leave that to us.

torch's own threads (ProcessGroupNCCL.cpp, HeartbeatMonitor::runLoop and Watchdog::runLoop):
The store of the first group is queried again and again, unless dumps are off.
A failure is written to the store even if dumps are off; then the group takes no operation and is not freed for a time.

Both ends may be in one process or in two. In two, `Notes` in a folder are common to them, and nothing hangs or dies.
"""

import contextlib
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final, Literal

import torch

from devices.collectives import COLLECTIVES, Collective, set_nccl_defaults
from tests.kvtransfer.hccl_rules import RuleBroken
from tests.kvtransfer.nccl_notes import BrokenRules, Notes

ERROR_HANDLING: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_LEFT_TO_US = "0"
_DTYPES = {
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool,
}  # fmt: skip
_SECOND_S = 0.07  # a second of torch's
_HEARTBEAT_S = 0.001  # torch's second would hit no message of a set-up of some milliseconds
_LAST_S = timedelta(seconds=60)
_MEET_S = 0.005
_ENDED = threading.Event()
_ENDED.set()
Message = tuple[int, torch.dtype]


@dataclass
class _Pair:
    """What both ends of one communicator have in common, if one process has both."""

    name: str
    joined: threading.Barrier
    devices: list[str] = field(default_factory=list)
    fate: str = ""
    sent: dict[int, list[Message]] = field(default_factory=lambda: {0: [], 1: []})
    taken: dict[int, list[Message]] = field(default_factory=lambda: {0: [], 1: []})  # by the rank that sent it


@dataclass
class NcclRules:
    """Owner of what each device is doing; `broken` lists what went against the rules, `made` counts groups.

    `on_host`: what stands for a device's memory is the host's. `environ` is what the user has set. `hung` devices never
    join a communicator, `dead` ones leave it. Operations end up to `late_s` late; `queue` has the end of each, in the
    order of their issue. `waits_for_receive`: a send ends only once it is received, as a large one does.
    """

    notes: Notes | None = None
    on_host: bool = False
    environ: dict[str, str] = field(default_factory=dict)
    hung: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    late_s: float = 0.0
    waits_for_receive: bool = False
    queue: list[threading.Event] = field(default_factory=list)
    broken: list[str] = field(init=False)
    made: int = 0
    _pairs: dict[str, _Pair] = field(default_factory=dict)
    _busy: dict[str, str] = field(default_factory=dict)
    _current: threading.local = field(default_factory=threading.local)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.broken = BrokenRules(self.notes)

    def collective(self) -> Collective:
        """The table's nccl, with gloo underneath."""
        return replace(
            COLLECTIVES["nccl"], on_host=self.on_host, lacking=lambda: None, make=self.make, make_link=self.make,
            free_bytes=lambda _: None, make_s=0.0, new_stream=lambda _: self.on_own_stream,
        )  # fmt: skip

    def make(self, store: Any, rank: int, of: int, host: str, timeout_s: float, device: str) -> "RuleBoundGroup":
        """Make one end, which is not joined to the other before its first operation."""
        environ = dict(self.environ)
        set_nccl_defaults(environ, host)
        name = secrets.token_hex(8)
        if rank == 0:
            store.set("pair", f"{name} {os.getpid()}")
            peer = store.get("peer").decode()
        else:
            name, peer = store.get("pair").decode().split()
            store.set("peer", str(os.getpid()))
        pair = self.enter(name, device, is_alone=peer != str(os.getpid()))
        watchdog = Watchdog(store, environ, self.broken)
        join_s = _SECOND_S * (int(environ.get("TORCH_NCCL_NONBLOCKING_TIMEOUT", "1800")) + 1)
        gloo = COLLECTIVES["gloo"].make(store, rank, of, host, timeout_s, device)
        return RuleBoundGroup(gloo, rank, device, pair, self, watchdog, join_s)

    def enter(self, name: str, device: str, *, is_alone: bool = False) -> _Pair:
        """Return what a communicator's ranks share, each with its own device; `is_alone`: one end only."""
        with self._lock:
            self.made += 1
            pair = self._pairs.setdefault(name, _Pair(name, joined=threading.Barrier(1 if is_alone else 2)))
            if device in pair.devices:
                self._break(f"both ranks of a communicator on {device}")
            pair.devices.append(device)
            pair.fate = "hung" if device in self.hung else "dead" if device in self.lost else pair.fate
            return pair

    @contextmanager
    def on_own_stream(self) -> Iterator[None]:
        """Within the block, this thread issues on a stream other than the one that computes."""
        self._current.is_own = True
        try:
            yield
        finally:
            self._current.is_own = False

    @contextmanager
    def issuing(self, device: str, what: str, *, is_first: bool = False) -> Iterator[None]:
        """Hold the device for one operation, unless it is the first of its communicator."""
        with self._lock:
            if not getattr(self._current, "is_own", False):
                self._break(f"{what} on the stream that computes on {device}")
            if device in self._busy and not is_first:
                self._break(f"{what} on {device} during {self._busy[device]}")
            if not is_first:
                self._busy[device] = what
        try:
            yield
        finally:
            with self._lock:
                if not is_first:
                    self._busy.pop(device, None)

    def check(self, device: str, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return the one tensor of an operation."""
        (tensor,) = tensors if len(tensors) == 1 else (None,)
        if tensor is None or tensor.dtype not in _DTYPES or not tensor.is_contiguous():
            self.break_rule(f"{[tensor.dtype for tensor in tensors]} on {device}")
        assert tensor is not None
        if not self.on_host and not tensor.untyped_storage().resizable():
            self.break_rule(f"memory that is the host's on {device}")
        if tensor.numel() == 0:
            self.break_rule(f"an operation of 0 bytes on {device}")
        return tensor

    def note(self, sender: int, pair: _Pair, kind: Literal["sent", "taken"], tensor: torch.Tensor) -> int:
        """Record an operation, compare it with that of the peer once both are known, and return its number."""
        with self._lock:
            sent, taken = pair.sent[sender], pair.taken[sender]
            mine, theirs = (sent, taken) if kind == "sent" else (taken, sent)
            mine.append((tensor.nbytes, tensor.dtype))
            number = len(mine) - 1
            if self.notes is not None:
                self.notes.add(f"{pair.name}-{sender}.{kind}", str(mine[number]))
            if number < len(theirs) and mine[number] != theirs[number]:
                self._break(f"operation {number} of rank {sender} is {mine[number]} here and {theirs[number]} there")
            return number

    def break_rule(self, what: str) -> None:
        """Record a broken rule, and raise it."""
        with self._lock:
            self._break(what)

    def _break(self, what: str) -> None:
        self.broken.append(what)
        raise RuleBroken(what)


class Watchdog:
    """torch's threads around one group. Here they query the store of every group, and far more often."""

    def __init__(self, store: Any, environ: dict[str, str], broken: list[str]) -> None:
        self._store, self._broken, self._ended = store, broken, threading.Event()
        self._ends_process = environ.get(ERROR_HANDLING) != _LEFT_TO_US
        self._pause_s = 4 * int(environ.get("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "15000")) / 1000
        self.lock = threading.Lock()
        """Taken by each operation, and held while the watchdog waits for dumps."""
        self._heartbeat = threading.Thread(target=self._query_store, name="pt_nccl_heartbt", daemon=True)
        if environ.get("TORCH_NCCL_DUMP_ON_TIMEOUT", "1") == "1":
            self._heartbeat.start()

    def failed(self, why: str, ended: threading.Event) -> None:
        """Report an operation that failed, wait for the dumps of all ranks, and end the process if configured so."""
        if self._ends_process:
            self._broken.append(f"the process would have been ended: {why}")
        with self.lock:
            ended.set()
            self._store.set("exception_dump", bytes(4))
            time.sleep(self._pause_s)

    def end(self) -> None:
        """Join the threads, as the group's destructor does."""
        self._ended.set()
        with self.lock:
            pass

    def _query_store(self) -> None:
        while not self._ended.wait(_HEARTBEAT_S):
            with contextlib.suppress(Exception):  # torch logs it
                self._store.check(["exception_dump"])


class RuleBoundGroup:
    """A group of two that can send, receive and be aborted, and nothing else."""

    def __init__(
        self, group: Any, rank: int, device: str, pair: _Pair, rules: NcclRules, watchdog: Watchdog, join_s: float
    ) -> None:
        self._group, self._rank, self._device, self._pair, self.rules = group, rank, device, pair, rules
        self.watchdog, self._is_joined, self._join_s = watchdog, False, join_s
        self.is_aborted = threading.Event()
        self._communicator, self._latest = threading.Lock(), _ENDED

    def __del__(self) -> None:
        self.watchdog.end()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> "RuleBoundWork":
        is_first = self._join()
        with self.watchdog.lock, self.rules.issuing(self._device, "send", is_first=is_first):
            tensor, pair = self.rules.check(self._device, tensors), self._pair
            number, taken = self.rules.note(self._rank, pair, "sent", tensor), pair.taken[self._rank]
            rules = self.rules  # a work does not keep its group, whose end is the owner's
            sent = Sent(tensor, rules, lambda: not rules.waits_for_receive or len(taken) > number)
            return self._start_work(self._group.send(tensors, peer, tag), sent)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> "RuleBoundWork":
        is_first = self._join()
        with self.watchdog.lock, self.rules.issuing(self._device, "recv", is_first=is_first):
            tensor, pair = self.rules.check(self._device, tensors), self._pair
            self.rules.note(peer, pair, "taken", tensor)
            received = Received(tensor)
            return self._start_work(self._group.recv([received.landing], peer, tag), received)

    def abort(self) -> None:
        """End the operations in progress, here and at the peer."""
        with self._communicator:
            has_ended = self.is_aborted.is_set()
            self.is_aborted.set()
        if not has_ended:
            gloo = COLLECTIVES["gloo"].abort
            assert gloo is not None
            with contextlib.suppress(RuntimeError):  # the timeout that it aborts with
                gloo(self._group, 1 - self._rank)

    def _join(self) -> bool:
        """Create the communicator unless it exists; return whether this call did."""
        if self._is_joined:
            return False
        with self._communicator:
            if self._pair.fate:
                time.sleep(self._join_s if self._pair.fate == "hung" else 0.0)
                self._pair.joined.abort()
            try:
                self._pair.joined.wait(self._join_s)
            except threading.BrokenBarrierError:
                dead = self._pair.fate == "dead"
                raise RuntimeError(
                    f"NCCL {'error, ncclRemoteError' if dead else 'timeout'} in: NCCLUtils.cpp"
                ) from None
            self._is_joined = True
        return True

    def _start_work(self, work: Any, memory: "Sent | Received") -> "RuleBoundWork":
        made = RuleBoundWork(work, memory, self._latest, self)
        self._latest = made.ended
        self.rules.queue.append(made.ended)
        return made


class Sent:
    """The memory of a send, which is read until the operation ends."""

    def __init__(self, tensor: torch.Tensor, rules: NcclRules, has_met: Callable[[], bool] = lambda: True) -> None:
        self._tensor, self._was, self.rules, self.has_met = tensor, tensor.clone(), rules, has_met

    def end(self) -> None:
        if not torch.equal(self._tensor, self._was):
            self.rules.broken.append("the memory of a send changed before its end")


class Received:
    """The memory of a receive, which is written when the operation ends."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self.landing, self.has_met = tensor, torch.empty_like(tensor), lambda: True

    def end(self) -> None:
        self._tensor.copy_(self.landing)


class RuleBoundWork:
    """An operation in progress, which ends after the one `before` it."""

    def __init__(self, work: Any, memory: Sent | Received, before: threading.Event, group: RuleBoundGroup) -> None:
        self._start_work, self._memory, self._before = work, memory, before
        self._error, self.ended = "", threading.Event()
        self.rules, self._is_aborted = group.rules, group.is_aborted
        self._watchdog = group.watchdog  # not the group, whose end is the owner's
        threading.Thread(target=self._wait, name="nccl-work", daemon=True).start()

    def is_completed(self) -> bool:
        """Whether it has ended, or failed."""
        return self.ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Only with a timeout does the host wait and learn of a failure."""
        if not self.ended.is_set():
            self.rules.break_rule("a wait for an operation that has not ended")
        if timeout is None:
            return True
        if self._error:
            raise RuntimeError(self._error)
        return True

    def _wait(self) -> None:
        began = time.monotonic()
        try:
            self._start_work.wait(_LAST_S)
        except RuntimeError as error:
            self._error = str(error)
            if not self._is_aborted.is_set():
                self._watchdog.failed(f"{error} after {time.monotonic() - began:.1f} s", self.ended)
        else:
            while not self._memory.has_met() and not self._is_aborted.wait(_MEET_S):
                pass
            self._is_aborted.wait(random.uniform(0.0, self.rules.late_s))
            self._before.wait()
            self._memory.end()
        self._start_work = None
        self.ended.set()
