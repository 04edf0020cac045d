"""Run work in a background process that outlives the command.

command ----fork----> wait: the child detached (0) or exited (its status; 130 or 143 if we signalled it)
           `--------> work ... leave(): detach from the terminal ... work
"""

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from pdserve.guarded import guarded
from pdserve.run_folder import open_log
from wire.errors import Unavailable

_STOP = (signal.SIGINT, signal.SIGTERM)
_STOPPED_STATUSES = (0, *(128 + number for number in _STOP))


def in_background(name: str, work: Callable[[Callable[[], None]], int], log: Path) -> int:
    """Run `work(leave)` in a child process; return 0 once it calls `leave`, else its exit status.

    Until `leave`, the child prints to our terminal and our SIGINT or SIGTERM is passed on to it: the status is then 130
    or 143. Afterwards it writes to `log`. The child never returns: its errors are reported as those of a command
    `name`. Raises Unavailable if the child was killed or stopped by another process.
    """
    sys.stdout.flush()
    read, write = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP)  # until the handlers that pass them on are installed
    pid = os.fork()
    if pid == 0:
        os.close(read)
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP)
        sys.exit(guarded(name, lambda: work(functools.partial(_redirect_output, write, log))))
    os.close(write)
    received: list[int] = []
    with _forward_signals(pid, received):
        status = None if _has_left(read) and not received else _status(pid)
    if status is None and received:  # a signal came while it detached
        status = _status(pid)
    if status is None:
        return 0
    if status not in _STOPPED_STATUSES:
        return status
    if received:
        return 128 + received[0]
    raise Unavailable("the cluster was stopped before it was ready, by `pdserve down` or by a signal to its supervisor")


@contextmanager
def _forward_signals(pid: int, received: list[int]) -> Iterator[None]:
    """Pass SIGINT and SIGTERM on to the child as SIGTERM, and append each to `received`."""

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)

    before = [signal.signal(number, forward) for number in _STOP]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP)
    try:
        yield
    finally:
        for number, handler in zip(_STOP, before, strict=True):
            signal.signal(number, handler)


def _has_left(read: int) -> bool:
    """Wait until the child calls `leave` or exits; return whether it called `leave`."""
    with os.fdopen(read, "rb", buffering=0) as left:
        return bool(left.read(1))


def _status(pid: int) -> int:
    """Wait for the child and return its exit status. Raises Unavailable if a signal killed it."""
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status < 0:
        raise Unavailable(f"the process that starts the cluster was killed by {signal.Signals(-status).name}")
    return status


def _redirect_output(write: int, log: Path) -> None:
    with open_log(log) as output, open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
        os.dup2(output.fileno(), 2)
    with suppress(BrokenPipeError):  # the command was killed meanwhile: keep running in the background
        os.write(write, b"1")
    os.close(write)
