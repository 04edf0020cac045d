"""Server-sent events, and detection of disconnected clients."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import orjson
from starlette.types import Receive, Send

from scheduler.http.exchange import HttpExchange, Receiving
from wire.errors import Cancelled

DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer the events
]


class ClientGone(Cancelled):
    """The client of this response disconnected, or does not read it."""


def event(body: dict[str, Any]) -> bytes:
    """Return one event that carries `body`."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


class EventWriter:
    """Writes one response of events. http/protocol.py disconnects a client that does not read.

    `exchange` is that of scheduler/http's server, None under another server.
    """

    def __init__(self, send: Send, exchange: HttpExchange | None = None) -> None:
        self._send = send
        self._exchange = exchange
        self.started = False

    @property
    def is_free(self) -> bool:
        """Whether `write_now` may be called: the response has begun and nothing is buffered."""
        return self._exchange is not None and self._exchange.is_free

    def write_now(self, content: bytes) -> None:
        """Send events without waiting."""
        assert self._exchange is not None
        self._exchange.write_now(content)

    async def write(self, content: bytes) -> None:
        """Send events, preceded by the response headers if they are the first."""
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": content, "more_body": True})

    async def fail(self, body: dict[str, Any]) -> None:
        """Send an error event, the last one, and end the response."""
        await self.write(event(body))
        await self.end()

    async def end(self) -> None:
        """End the response."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; if the client disconnects first, cancel it and raise ClientGone."""
    if isinstance(receive, Receiving):
        await _until_interrupted(receive, work)
    else:
        await _until_received(receive, work)


async def _until_interrupted(receive: Receiving, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` in this task, which our own server cancels when the client disconnects, or not at all if it has."""
    if receive.why_gone:  # cancelling work that never awaits would cancel what follows it
        work.close()
        raise ClientGone(receive.why_gone)
    task = asyncio.current_task()
    assert task is not None
    receive.when_gone(task.cancel)
    try:
        await work
    except asyncio.CancelledError:
        if receive.why_gone and task.uncancel() == 0:
            raise ClientGone(receive.why_gone) from None
        raise
    finally:
        receive.when_gone(None)


async def _until_received(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone("the client disconnected")
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
