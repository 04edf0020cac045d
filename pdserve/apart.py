"""Do something once in a process of its own, so that what it imports does not stay in ours."""

import os
from collections.abc import Callable
from contextlib import suppress


def apart(work: Callable[[], object]) -> None:
    """Return when `work` has ended in a fork of this process, whichever way; what it made lies on disk.

    Whoever needs its error does it again: what failed there fails here.
    """
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            work()
        os._exit(0)
    os.waitpid(pid, 0)
