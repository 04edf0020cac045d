"""SIGTERM ends a build as an exception does, so that what it started is killed and its drafts are taken away."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGINT)


def unwind_on_sigterm() -> None:
    """From now on SIGTERM raises SystemExit in the main thread. Only for a process of our own."""
    signal.signal(signal.SIGTERM, _exit)


@contextmanager
def ending_later() -> Iterator[None]:
    """Let SIGTERM and SIGINT wait for the end of this block, where handlers of ours would raise within it.

    A process that is just being started belongs to nobody yet: who is interrupted there leaves it behind.
    """
    handlers = {number: signal.getsignal(number) for number in _ENDING}
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main thread alone
        handlers = {}
    came: list[int] = []
    for number, handler in handlers.items():
        if callable(handler):
            signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if callable(handler):
                signal.signal(number, handler)
        for held in came:
            signal.raise_signal(held)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
