"""The rows of stored responses: bounded in number, bytes and age; the oldest are deleted first."""

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scheduler.responses_store.response_store import StoredResponse
from scheduler.responses_store.sqlite_file import open_file
from wire.errors import InvalidRequest, Overloaded

INTERRUPTED = {"code": "server_error", "message": "the scheduler ended before this response: send the request again"}
"""The error of responses that were not done when their process ended."""
LOST = {"code": "server_error", "message": "the end of this response could not be stored: send the request again"}
"""The error of responses whose `finish` failed."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """How much a store holds, and for how long."""

    max_responses: int
    max_bytes: int
    ttl_s: float


class SqliteRows:
    """Owner of the file: every method runs on the thread that opened it, and may raise sqlite3.Error.

    Responses that are not done are never dropped to make room for others; `num_interrupted` counts those that were
    not done when the last process ended.
    """

    def __init__(self, path: Path, limits: StoreLimits, clock: Callable[[], float], *, busy_s: float) -> None:
        """Open the file; `clock` is the time in seconds since 1970. Raises ConfigError."""
        self._limits, self._clock = limits, clock
        self._lost: set[str] = set()  # ids whose `finish` failed
        self._connection, self.store_id = open_file(path, busy_s=busy_s)
        self.num_responses = self.num_bytes = self.num_interrupted = 0
        try:
            self.num_responses, self.num_bytes = self._connection.execute(
                "SELECT count(*), coalesce(sum(num_bytes), 0) FROM response"
            ).fetchone()
            left = [one for (one,) in self._connection.execute("SELECT id FROM response WHERE done = 0")]
            self._fail(left, INTERRUPTED)
            self.num_interrupted = len(left)
            self.drop_expired()
            with self._transaction():  # the limits may be lower than the last process's
                self._make_room(0, 0)
        except BaseException:
            self._connection.close()
            raise

    def add(self, stored: StoredResponse) -> None:
        """Keep a response that is not done. Raises InvalidRequest if it alone is too large, Overloaded without room."""
        num_bytes = len(stored.response) + len(stored.items)
        if num_bytes > self._limits.max_bytes:
            raise InvalidRequest(
                f"the input has {num_bytes} bytes, more than the server stores ({self._limits.max_bytes}): send less, "
                "or set store to false",
                "input",
            )
        with self._transaction():
            self._drop_expired()
            self._make_room(1, num_bytes)
            self._connection.execute(
                "INSERT INTO response VALUES (?, ?, ?, ?, 0, ?, ?, ?, x'')",
                (
                    stored.response_id, stored.owner, self._clock(), stored.background, num_bytes, stored.response,
                    stored.items,
                ),
            )  # fmt: skip
            self._change(1, num_bytes)

    def finish(self, response_id: str, response: bytes | None, events: bytes = b"") -> bool:
        """Store the final object of a response, or drop the response; return whether an object was stored.

        Nothing is stored if no unfinished response has this id, or if there is no room. If writing fails, the response
        is marked as failed as soon as the file can be written.
        """
        try:
            if response is None:
                self.forget(response_id)
            return response is not None and self._finish(response_id, response, events)
        except sqlite3.Error:
            self._lost.add(response_id)
            raise

    def _finish(self, response_id: str, response: bytes, events: bytes) -> bool:
        row = self._connection.execute(
            "SELECT num_bytes, length(items) FROM response WHERE id = ? AND done = 0", (response_id,)
        ).fetchone()
        if row is None:
            return False
        before, items_bytes = row
        num_bytes = len(response) + items_bytes + len(events)
        with self._transaction():
            try:
                self._make_room(0, num_bytes - before)
            except Overloaded:
                self._delete("id = ?", response_id)
                return False
            self._connection.execute(
                "UPDATE response SET done = 1, num_bytes = ?, response = ?, events = ? WHERE id = ?",
                (num_bytes, response, events, response_id),
            )
            self._change(0, num_bytes - before)
        return True

    def find(self, response_id: str, owner: str) -> StoredResponse | None:
        """Return the response of this owner, None if there is none."""
        if response_id in self._lost:
            self._fail_lost()
        row = self._connection.execute(
            "SELECT background, response, items, done, events FROM response"
            " WHERE id = ? AND owner = ? AND (done = 0 OR created_s >= ?)",
            (response_id, owner, self._oldest_s()),
        ).fetchone()
        if row is None:
            return None
        background, response, items, done, events = row
        return StoredResponse(response_id, owner, bool(background), response, items, bool(done), events)

    def delete(self, response_id: str, owner: str) -> bool:
        """Delete the response of this owner; return whether there was one."""
        found = self.find(response_id, owner)
        if found is not None:
            self.forget(response_id)
        return found is not None

    def forget(self, response_id: str) -> None:
        """Delete a response, if it is there."""
        with self._transaction():
            self._delete("id = ?", response_id)

    def drop_expired(self) -> None:
        """Delete the expired responses."""
        self._fail_lost()
        with self._transaction():
            self._drop_expired()

    def close(self) -> None:
        """Close the file; sqlite removes its own files next to it."""
        self._connection.close()

    def _oldest_s(self) -> float:
        return self._clock() - self._limits.ttl_s

    def _drop_expired(self) -> None:
        self._delete("done = 1 AND created_s < ?", self._oldest_s())

    def _make_room(self, num_responses: int, num_bytes: int) -> None:
        """Delete the oldest done responses to make room. Raises Overloaded, and deletes none, if that is not enough."""
        rows = self.num_responses + num_responses - self._limits.max_responses
        size = self.num_bytes + num_bytes - self._limits.max_bytes
        dropped = list[int]()
        if rows > 0 or size > 0:
            oldest = self._connection.execute(
                "SELECT rowid, num_bytes FROM response WHERE done = 1 ORDER BY created_s, rowid"
            )
            while rows > len(dropped) or size > 0:
                row = oldest.fetchone()
                if row is None:
                    raise Overloaded("the server stores as many running responses as it may: set store to false")
                dropped.append(row[0])
                size -= row[1]
        for row_id in dropped:
            self._delete("rowid = ?", row_id)

    def _delete(self, condition: str, value: str | float) -> None:
        counted = f"SELECT count(*), coalesce(sum(num_bytes), 0) FROM response WHERE {condition}"  # noqa: S608 - ours
        rows, size = self._connection.execute(counted, (value,)).fetchone()
        if rows:
            self._connection.execute(f"DELETE FROM response WHERE {condition}", (value,))  # noqa: S608 - ours
            self._change(-rows, -size)

    def _change(self, num_responses: int, num_bytes: int) -> None:
        self.num_responses += num_responses
        self.num_bytes += num_bytes

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commit what the body does; if it raises, undo it, and the counts with it."""
        counts = self.num_responses, self.num_bytes
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            self.num_responses, self.num_bytes = counts
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _fail_lost(self) -> None:
        if self._lost:
            self._fail(self._lost, LOST)
            self._lost.clear()

    def _fail(self, ids: Iterable[str], error: Mapping[str, str]) -> None:
        """Mark those of these responses that are not done as failed."""
        with self._transaction():
            for response_id in ids:
                query = "SELECT response FROM response WHERE id = ? AND done = 0"
                for (response,) in self._connection.execute(query, (response_id,)).fetchall():
                    failed = json.dumps(json.loads(response) | {"status": "failed", "error": error}).encode()
                    self._connection.execute(
                        "UPDATE response SET done = 1, response = ?, num_bytes = length(items) + ? WHERE id = ?",
                        (failed, len(failed), response_id),
                    )
                    self._change(0, len(failed) - len(response))
