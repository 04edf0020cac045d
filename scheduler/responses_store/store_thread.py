"""A thread that runs the calls of an event loop one after the other."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from wire.errors import DeadlineExceeded, Overloaded

_T = TypeVar("_T")


class StoreThread:
    """Owner of the thread and of its queue, in which at most `max_waiting` calls wait.

    `timeout_s`: how long to wait for the result of a call. `regularly` is called every `interval_s`.
    """

    def __init__(self, *, max_waiting: int, timeout_s: float, regularly: Callable[[], None], interval_s: float) -> None:
        self._max_waiting, self._timeout_s = max_waiting, timeout_s
        self._regularly, self._interval_s = regularly, interval_s
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pdserve-responses", daemon=True)
        self._thread.start()

    async def call(self, work: Callable[[], _T], *, always: bool = False) -> _T:
        """Return the result of `work`, which runs after the calls before it, even if this wait ends earlier.

        Raises what `work` raises, DeadlineExceeded, and, unless `always`, Overloaded.
        """
        if not always and self._waiting.qsize() >= self._max_waiting:
            raise Overloaded("too many requests wait for the store of responses")
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(asyncio.wrap_future(self.post(work)))
        except TimeoutError:
            raise DeadlineExceeded(f"the store of responses did not answer within {self._timeout_s:g} s") from None

    def post(self, work: Callable[[], _T]) -> "Future[_T]":
        """Run `work` after the calls before it, without a limit."""
        future = Future[_T]()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - the outermost frame of a call
                future.set_exception(error)

        self._waiting.put(run)
        return future

    async def close(self, last: Callable[[], None]) -> None:
        """Run `last` after the waiting calls and end the thread. Raises what `last` raises, and DeadlineExceeded."""
        try:
            await self.call(last, always=True)
        finally:
            self._waiting.put(None)
        self._thread.join(self._timeout_s)

    def _run(self) -> None:
        due_s = time.monotonic() + self._interval_s
        while True:
            try:
                work = self._waiting.get(timeout=max(0.0, due_s - time.monotonic()))
            except queue.Empty:
                self._regularly()
                due_s = time.monotonic() + self._interval_s
                continue
            if work is None:
                return
            work()
            del work  # it refers to what it stores
