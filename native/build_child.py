"""`python -m native.build_child NAME LOCK`: the child process of native/background.py, which documents the protocol."""

import os
import signal
import sys
import time
from collections.abc import Sequence

from native.background import BACKGROUND_TIMEOUT_S
from native.builder import build_locked
from native.cache import BuildStopped, NoNative
from native.jobs import Limits
from native.libraries import RECIPES
from native.termination import unwind_on_sigterm

_NICE = 15  # a 28th of a busy instance's CPU share: does not delay it, and the build still finishes
_STDIN = 0


def main(argv: Sequence[str]) -> int:
    """Build one library while stdin is open. On failure prints the reason and returns 1."""
    name, _lock = argv  # the lock is held until this process exits
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    unwind_on_sigterm()
    limits = Limits(time.monotonic() + BACKGROUND_TIMEOUT_S, stop_fd=_STDIN, nice=_NICE)
    try:
        build_locked(RECIPES[name], os.environ, limits)
    except BuildStopped:
        return 1
    except (NoNative, OSError) as error:
        sys.stdout.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
