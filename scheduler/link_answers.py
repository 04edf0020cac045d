"""Pending measurements of one instance's links, and their results."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from wire.errors import InstanceLost, Overloaded
from wire.messages import LinkMeasured


class LinkAnswers:
    """Owner of the waits of one session, at most one per peer; all end with the session."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[LinkMeasured]] = {}
        self._error: InstanceLost | None = None

    @contextmanager
    def expect(self, peer_id: str) -> Iterator[asyncio.Future[LinkMeasured]]:
        """Yield a future of the next result for `peer_id`. Raises Overloaded if one is pending, InstanceLost."""
        if self._error is not None:
            raise InstanceLost(str(self._error))
        if peer_id in self._waiting:
            raise Overloaded(f"the link to {peer_id} is being measured")
        answer = self._waiting[peer_id] = asyncio.get_running_loop().create_future()
        try:
            yield answer
        finally:
            del self._waiting[peer_id]
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # else asyncio would log that it was never retrieved

    def deliver(self, event: LinkMeasured) -> None:
        """Complete the wait for this result; drop a result without one."""
        answer = self._waiting.get(event.peer_id)
        if answer is not None and not answer.done():
            answer.set_result(event)

    def end(self, error: InstanceLost) -> None:
        """Fail all waits: the session has ended."""
        self._error = error
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)
