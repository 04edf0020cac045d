"""SIGTERM for commands that start others: it unwinds them as Ctrl-C does, so that what they started is ended too."""

import signal
import sys
from types import FrameType


def unwind_on_sigterm() -> None:
    """Let SIGTERM do what Ctrl-C would, from here on; where Ctrl-C is ignored, raise SystemExit with status 143.

    While an event loop runs, Ctrl-C cancels its task between two steps: nothing is left half started.
    """
    signal.signal(signal.SIGTERM, _unwind)


def _unwind(number: int, frame: FrameType | None) -> None:
    interrupt = signal.getsignal(signal.SIGINT)
    if not callable(interrupt):
        sys.exit(128 + number)
    interrupt(signal.SIGINT, frame)
