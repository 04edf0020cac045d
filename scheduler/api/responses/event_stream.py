"""Answer with the events of a response that was generated in the background, starting at any of them."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from scheduler.api.sse import SSE, until_disconnect
from scheduler.responses_store.background_runs import split_events


@dataclass(frozen=True, slots=True)
class EventStream:
    """An ASGI response. After `comment_s` without an event it sends a comment; None: never."""

    events: AsyncIterator[bytes]
    comment_s: float | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises ClientGone."""
        await until_disconnect(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": SSE.headers})
        waiting = asyncio.ensure_future(anext(self.events, b""))
        try:
            while True:
                done, _ = await asyncio.wait((waiting,), timeout=self.comment_s)
                content = waiting.result() if done else SSE.comment
                await send({"type": "http.response.body", "body": content, "more_body": bool(content)})
                if not content:
                    return
                if done:
                    waiting = asyncio.ensure_future(anext(self.events, b""))
        finally:
            waiting.cancel()


async def stored_events(events: bytes, first: int) -> AsyncIterator[bytes]:
    """Yield the events of a stream that has ended, from number `first` on."""
    if rest := b"".join(split_events(events)[first:]):
        yield rest
