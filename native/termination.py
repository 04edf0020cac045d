"""SIGTERM ends a build as an exception does, so that what it started is killed and its drafts are taken away."""

import signal
import sys
from types import FrameType


def unwind_on_sigterm() -> None:
    """From now on SIGTERM raises SystemExit in the main thread. Only for a process of our own."""
    signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
