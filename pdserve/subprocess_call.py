"""Do something once in a process of its own, so that what it imports does not stay in ours."""

import os
from collections.abc import Callable
from contextlib import suppress

from pdserve import tether


def apart(work: Callable[[], object]) -> bool:
    """Return whether `work` ended well in a fork of this process; what it made lies on disk.

    Whoever needs its error does it again: what failed there fails here. It ends with us, and what it started too.
    """
    held, ours = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            os.close(ours)
            tether.hold_on({tether.VARIABLE: str(held)}, lambda: None)
            work()
            os._exit(0)
        os._exit(1)
    os.close(held)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        os.close(ours)
