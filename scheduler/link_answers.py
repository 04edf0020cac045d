"""Who waits for one instance to say how a link of it is."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from wire.errors import InstanceLost, Overloaded
from wire.messages import LinkMeasured


class LinkAnswers:
    """Owner of the waits of one session, at most one towards each peer; all end with the session."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[LinkMeasured]] = {}
        self._over: InstanceLost | None = None

    @contextmanager
    def expect(self, peer_id: str) -> Iterator[asyncio.Future[LinkMeasured]]:
        """Wait for the next answer about `peer_id`. Raises Overloaded while another wait stands, InstanceLost."""
        if self._over is not None:
            raise InstanceLost(str(self._over))
        if peer_id in self._waiting:
            raise Overloaded(f"the link to {peer_id} is being measured")
        answer = self._waiting[peer_id] = asyncio.get_running_loop().create_future()
        try:
            yield answer
        finally:
            del self._waiting[peer_id]
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # or asyncio would tell that nobody looked at it

    def hear(self, event: LinkMeasured) -> None:
        """An answer came; one that nobody waits for any more is dropped."""
        answer = self._waiting.get(event.peer_id)
        if answer is not None and not answer.done():
            answer.set_result(event)

    def end(self, error: InstanceLost) -> None:
        """The session is over."""
        self._over = error
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)
