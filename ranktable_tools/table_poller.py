"""Read a watched table on a thread, so that a hanging file system does not block the event loop."""

import asyncio
import contextlib
import threading
from typing import Generic, TypeVar

from ranktable_tools.errors import RanktableError
from ranktable_tools.watched_table import WatchedTable

Table = TypeVar("Table")

READ_TIMEOUT_S = 10.0


class TablePoller(Generic[Table]):
    """Owns the one read in progress, on a daemon thread."""

    def __init__(self, file: WatchedTable[Table], *, timeout_s: float = READ_TIMEOUT_S) -> None:
        self._file = file
        self._timeout_s = timeout_s
        self._reading: asyncio.Future[Table | RanktableError | None] | None = None
        self._is_slow = False

    async def poll(self) -> Table | RanktableError | None:
        """Return the result of the file's `poll`, or, once, an error if that times out.

        After a timeout the next call waits for the same poll. When that completes, the table is returned even if it has
        not changed, to clear the error. Exceptions are re-raised.
        """
        if self._reading is None:
            self._reading = self._start()
        done, _ = await asyncio.wait({self._reading}, timeout=self._timeout_s)
        if not done:
            return self._slow_error()
        finished, self._reading = self._reading, None
        was_slow, self._is_slow = self._is_slow, False
        found = finished.result()
        return self._file.table if found is None and was_slow and not self._file.is_unusable else found

    def _slow_error(self) -> RanktableError | None:
        if self._is_slow:
            return None
        self._is_slow = True
        return RanktableError(f"{self._file.path}: no response from its file system for {self._timeout_s:g} s")

    def _start(self) -> "asyncio.Future[Table | RanktableError | None]":
        loop = asyncio.get_running_loop()
        reading: asyncio.Future[Table | RanktableError | None] = loop.create_future()

        def poll() -> None:
            found, failure = None, None
            try:
                found = self._file.poll()
            except Exception as error:  # noqa: BLE001 - carried to the waiting task
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop has closed: nothing waits any more
                loop.call_soon_threadsafe(settle, found, failure)

        def settle(found: Table | RanktableError | None, failure: Exception | None) -> None:
            if reading.cancelled():
                return
            if failure is not None:
                reading.set_exception(failure)
            else:
                reading.set_result(found)

        threading.Thread(target=poll, name="table", daemon=True).start()
        return reading
