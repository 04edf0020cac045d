"""`python -m native.build_child NAME LOCK`: the child of native/background.py, which says how it is spoken to."""

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from native.background import BACKGROUND_TIMEOUT_S
from native.builder import build_locked
from native.cache import BuildStopped, NoNative
from native.libraries import RECIPES
from native.termination import unwind_on_sigterm

_LOWEST = 19
_STDIN = 0


def main(argv: Sequence[str]) -> int:
    """Build one library while stdin is open. Returns 1, having said why, where that fails."""
    name, _lock = argv  # the descriptor is ours as long as we live
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    unwind_on_sigterm()
    _stand_back()
    try:
        build_locked(RECIPES[name], os.environ, timeout_s=BACKGROUND_TIMEOUT_S, stop_fd=_STDIN)
    except BuildStopped:
        return 1
    except (NoNative, OSError) as error:
        sys.stdout.write(f"{error}\n")
        return 1
    return 0


def _stand_back() -> None:
    """Leave the cores to whoever wants them, in this session and, where the kernel groups by sessions, in others."""
    os.nice(_LOWEST)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_LOWEST))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
