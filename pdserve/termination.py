"""Handle SIGTERM like Ctrl-C in commands that start processes, so that unwinding stops those too."""

import signal
import sys
from types import FrameType


def unwind_on_sigterm() -> None:
    """Make SIGTERM act like Ctrl-C from now on; where Ctrl-C is ignored, raise SystemExit with status 143.

    While an event loop runs, Ctrl-C cancels its main task between two callbacks: nothing is left half started.
    """
    signal.signal(signal.SIGTERM, _raise_interrupt)


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    interrupt = signal.getsignal(signal.SIGINT)
    if not callable(interrupt):
        sys.exit(128 + number)
    interrupt(signal.SIGINT, frame)
