"""Go on in a process of its own after the command has returned to the shell.

command ----fork----> wait: it left us (0), or ended (its exit status; 130, 143 where we told it to)
           `--------> work ... leave(): the terminal is let go ... work
"""

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from pdserve.cli import guarded
from pdserve.run_folder import open_log
from wire.errors import Unavailable

_STOP = (signal.SIGINT, signal.SIGTERM)
_ENDED_AS_TOLD = (0, *(128 + number for number in _STOP))


def in_background(name: str, work: Callable[[Callable[[], None]], int], log: Path) -> int:
    """Run `work(leave)` in a process of its own; return 0 once that calls `leave`, else its exit status.

    Until then it speaks on our terminal, and is told to end when we are: the status is then 130 or 143. From then on
    it speaks into `log`. It never returns here: an error of ours ends it as it would end a command called `name`.
    Raises Unavailable when it was killed, or told to end by others.
    """
    sys.stdout.flush()
    read, write = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP)  # none may come while it is not ours to tell it
    pid = os.fork()
    if pid == 0:
        os.close(read)
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP)
        sys.exit(guarded(name, lambda: work(functools.partial(_leave, write, log))))
    os.close(write)
    told: list[int] = []
    with _passed_on_to(pid, told):
        status = None if _has_left(read) and not told else _status(pid)
    if status is None and told:  # as it left
        status = _status(pid)
    if status is None:
        return 0
    if status not in _ENDED_AS_TOLD:
        return status
    if told:
        return 128 + told[0]
    raise Unavailable("the cluster was ended before it was ready, by `pdserve down` or by a signal to its supervisor")


@contextmanager
def _passed_on_to(pid: int, told: list[int]) -> Iterator[None]:
    """Whoever tells us to end tells it; `told` has the signals that came."""

    def tell(number: int, frame: FrameType | None) -> None:
        told.append(number)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)

    before = [signal.signal(number, tell) for number in _STOP]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP)
    try:
        yield
    finally:
        for number, handler in zip(_STOP, before, strict=True):
            signal.signal(number, handler)


def _has_left(read: int) -> bool:
    """Return, once it is known, whether the work goes on without us."""
    with os.fdopen(read, "rb", buffering=0) as left:
        return bool(left.read(1))


def _status(pid: int) -> int:
    """Wait for its end and return its exit status. Raises Unavailable where a signal ended it."""
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status < 0:
        raise Unavailable(f"what starts the cluster was ended by {signal.Signals(-status).name}")
    return status


def _leave(write: int, log: Path) -> None:
    with open_log(log) as output, open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
        os.dup2(output.fileno(), 2)
    with suppress(BrokenPipeError):  # the command was killed meanwhile: we stay, as we were asked to
        os.write(write, b"1")
    os.close(write)
