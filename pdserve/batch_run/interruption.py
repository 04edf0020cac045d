"""SIGINT and SIGTERM while a batch runs: the first stops it cleanly, the second at once.

no work on a loop -> KeyboardInterrupt in the main thread; work on a loop -> its task is cancelled
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine
from types import FrameType
from typing import Any, Self, TypeVar

from scheduler.loop import run as run_loop

T = TypeVar("T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NOTICE = b"\nstopping; a second signal stops at once\n"


class Interruption:
    """Owns both signals of this process while entered; `number` is the first signal received, else None."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._work: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def status(self) -> int:
        """The exit status after the signal: 130 or 143."""
        return 128 + (self.number or signal.SIGINT)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on its own event loop. Raises KeyboardInterrupt if a signal cancels it."""
        if self.number is not None:
            work.close()
            raise KeyboardInterrupt
        try:
            return run_loop(self._run_cancellable(work))
        except asyncio.CancelledError:
            if self.number is None:
                raise
            raise KeyboardInterrupt from None

    async def _run_cancellable(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None, "a loop runs tasks"
        self._work = asyncio.get_running_loop(), task
        try:
            return await work
        finally:
            self._work = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            os._exit(128 + number)
        self.number = number
        with contextlib.suppress(OSError):  # the reader of stderr may have got the same Ctrl-C
            os.write(2, _NOTICE)
        if self._work is None:
            raise KeyboardInterrupt
        loop, task = self._work
        loop.call_soon_threadsafe(task.cancel)
