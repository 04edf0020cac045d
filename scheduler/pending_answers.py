"""Pending requests to one instance that do not concern a prompt, such as measurements of links, and their answers."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from wire.errors import InstanceLost, Overloaded

E = TypeVar("E")


class PendingAnswers(Generic[E]):
    """Owner of the waits of one session, at most one per key; all end with the session."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[E]] = {}
        self._error: InstanceLost | None = None

    @contextmanager
    def expect(self, key: str, busy: str) -> Iterator[asyncio.Future[E]]:
        """Yield a future of the next answer for `key`.

        Raises Overloaded(busy) if a request with this key is pending, InstanceLost if the session has ended.
        """
        if self._error is not None:
            raise InstanceLost(str(self._error))
        if key in self._waiting:
            raise Overloaded(busy)
        answer = self._waiting[key] = asyncio.get_running_loop().create_future()
        try:
            yield answer
        finally:
            del self._waiting[key]
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # else asyncio would log that it was never retrieved

    def deliver(self, key: str, event: E) -> None:
        """Complete the wait for this answer; drop an answer for which nothing waits."""
        answer = self._waiting.get(key)
        if answer is not None and not answer.done():
            answer.set_result(event)

    def end(self, error: InstanceLost) -> None:
        """Fail all waits: the session has ended."""
        self._error = error
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)
