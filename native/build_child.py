"""`python -m native.build_child NAME LOCK`: the child of native/background.py, which says how it is spoken to."""

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

_NICE = 15  # a 28th of what a busy instance gets: it is not held up, and the build still ends
_STDIN = 0


def main(argv: Sequence[str]) -> int:
    """Build one library while stdin is open. Returns 1, having said why, where that fails."""
    name, _lock = argv  # the descriptor is ours as long as we live
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
