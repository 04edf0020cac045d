"""What a child process sets for itself: to end with its parent, and the CPU time of one piece of work."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1  # Linux, include/uapi/linux/prctl.h


def end_with(parent: int) -> None:
    """Have the kernel kill this process when the thread of `parent` that started it ends.

    So the parent must start it from a thread that lives as long as this process is needed.
    """
    signal_at_parent_end(signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call above
        sys.exit(1)


def signal_at_parent_end(number: int) -> None:
    """Have the kernel send this process signal `number` when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """End this process by SIGPROF, which nothing handles, if the block takes more CPU time than this."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
