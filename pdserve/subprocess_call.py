"""Run a function once in a forked process, so that its imports do not stay in ours."""

import os
from collections.abc import Callable
from contextlib import suppress

from pdserve import parent_death


def run_in_fork(work: Callable[[], object]) -> bool:
    """Run `work` in a fork; return whether it succeeded. Its only other results are files it wrote.

    A caller that needs the error calls `work` again itself. The fork and its children die with us.
    """
    held, ours = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            os.close(ours)
            parent_death.die_with_parent({parent_death.VARIABLE: str(held)}, lambda: None)
            work()
            os._exit(0)
        os._exit(1)
    os.close(held)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        os.close(ours)
