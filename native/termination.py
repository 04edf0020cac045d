"""Turn SIGTERM into an exception, so that a build kills its child processes and removes its drafts."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGINT)


def unwind_on_sigterm() -> None:
    """Make SIGTERM raise SystemExit in the main thread. Only for our own processes."""
    signal.signal(signal.SIGTERM, _exit)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Defer SIGTERM and SIGINT to the end of this block, if their handlers are Python functions.

    An exception while a process is being started would leave that process running without an owner.
    """
    handlers = {number: signal.getsignal(number) for number in _ENDING}
    if threading.current_thread() is not threading.main_thread():  # handlers run only in the main thread
        handlers = {}
    received: list[int] = []
    for number, handler in handlers.items():
        if callable(handler):
            signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if callable(handler):
                signal.signal(number, handler)
        for signum in received:
            signal.raise_signal(signum)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
