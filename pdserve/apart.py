"""Do something once in a process of its own, so that what it imports does not stay in ours."""

import os
from collections.abc import Callable
from contextlib import suppress


def apart(work: Callable[[], object]) -> bool:
    """Return whether `work` ended well in a fork of this process; what it made lies on disk.

    Whoever needs its error does it again: what failed there fails here.
    """
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            work()
            os._exit(0)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
