"""Stored responses in a sqlite file, on a thread of its own. Implements ResponseStore."""

import asyncio
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self, TypeVar

from scheduler.responses_store.response_ids import new_response_id, store_of
from scheduler.responses_store.response_store import StoredResponse
from scheduler.responses_store.sqlite_rows import SqliteRows, StoreLimits
from scheduler.responses_store.store_thread import StoreThread
from telemetry.capped_logs import CappedLog
from telemetry.logs import EventLogger
from wire.errors import ConfigError, DeadlineExceeded, Unavailable

_T = TypeVar("_T")
_log = EventLogger("responses")
MAX_WAITING = 1000
TIMEOUT_S = 10.0
DROP_EVERY_S = 60.0


class SqliteStore:
    """Passes the calls of the event loop on to the thread that has the file."""

    def __init__(self, timeout_s: float) -> None:
        """Use `open`."""
        self._rows: SqliteRows | None = None
        self._thread = StoreThread(
            max_waiting=MAX_WAITING, timeout_s=timeout_s, regularly=self._drop_expired, interval_s=DROP_EVERY_S
        )
        self._failures = CappedLog(_log)

    @classmethod
    async def open(
        cls, path: Path, limits: StoreLimits, clock: Callable[[], float] = time.time, *, timeout_s: float = TIMEOUT_S,
    ) -> Self:  # fmt: skip
        """Open the file, or create it. Raises ConfigError if it is unusable or another process uses it."""
        store = cls(timeout_s)
        try:
            store._rows = rows = await store._thread.call(
                lambda: SqliteRows(path, limits, clock, busy_s=timeout_s / 2), always=True
            )
        except DeadlineExceeded as error:
            raise ConfigError(f"--responses-store {path} cannot be opened: {error}") from error
        except BaseException:
            await store.close()
            raise
        _log.info(
            "responses_store_opened", path=path, responses=rows.num_responses, bytes=rows.num_bytes,
            interrupted=rows.num_interrupted,
        )  # fmt: skip
        return store

    def new_id(self) -> str:
        """Return the id of a new response; it names this store."""
        return new_response_id(self._opened.store_id)

    def is_foreign(self, response_id: str) -> bool:
        """Whether an id names another store."""
        return store_of(response_id) not in (None, self._opened.store_id)

    async def add(self, stored: StoredResponse) -> None:
        """Keep a response that is not done."""
        rows = self._opened
        try:
            await self._call(lambda: rows.add(stored))
        except (asyncio.CancelledError, DeadlineExceeded):
            self._thread.post(lambda: rows.forget(stored.response_id))  # nobody will finish it
            raise

    async def finish(self, response_id: str, response: bytes | None, events: bytes = b"") -> bool:
        """Store the final object of a response, which is then done; None: drop the response."""
        rows = self._opened
        return await self._call(lambda: rows.finish(response_id, response, events), always=True)

    async def find(self, response_id: str, owner: str) -> StoredResponse | None:
        """Return the response of this owner."""
        rows = self._opened
        return await self._call(lambda: rows.find(response_id, owner))

    async def delete(self, response_id: str, owner: str) -> bool:
        """Delete the response of this owner."""
        rows = self._opened
        return await self._call(lambda: rows.delete(response_id, owner))

    async def close(self) -> None:
        """Complete the waiting calls and close the file."""
        rows = self._rows
        try:
            await self._thread.close(lambda: None if rows is None else rows.close())
        except (sqlite3.Error, DeadlineExceeded) as error:
            _log.warning("responses_store_not_closed", error=str(error))

    @property
    def _opened(self) -> SqliteRows:
        assert self._rows is not None, "`open` sets it"
        return self._rows

    async def _call(self, work: Callable[[], _T], *, always: bool = False) -> _T:
        try:
            return await self._thread.call(work, always=always)
        except sqlite3.Error as error:
            self._failures.warning("responses_store_failed", "responses_store_failed", error=str(error))
            raise Unavailable(f"the store of responses failed: {error}") from error

    def _drop_expired(self) -> None:
        if self._rows is not None:
            try:
                self._rows.drop_expired()
            except sqlite3.Error as error:
                self._failures.warning("responses_store_failed", "responses_store_failed", error=str(error))
