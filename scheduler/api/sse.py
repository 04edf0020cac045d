"""Server-sent events, and noticing that a client has gone."""

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
    (b"x-accel-buffering", b"no"),  # nginx would hold the events back
]


class ClientGone(Cancelled):
    """The client of this very response went away, or does not read it."""


def event(body: dict[str, Any]) -> bytes:
    """Return one event that carries `body`."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


class EventWriter:
    """Writes one response of events. A client that does not read is the server's to give up (http/protocol.py).

    `exchange` is our own server's, if it is that which serves.
    """

    def __init__(self, send: Send, exchange: HttpExchange | None = None) -> None:
        self._send = send
        self._exchange = exchange
        self.started = False

    @property
    def is_free(self) -> bool:
        """Whether `write_now` may be called: the response has begun and nothing waits to be written."""
        return self._exchange is not None and self._exchange.is_free

    def write_now(self, content: bytes) -> None:
        """Send events without waiting."""
        assert self._exchange is not None
        self._exchange.write_now(content)

    async def write(self, content: bytes) -> None:
        """Send events, the response's start before the first."""
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": content, "more_body": True})

    async def fail(self, body: dict[str, Any]) -> None:
        """Send an error and end the response: no event stands after it."""
        await self.write(event(body))
        await self.end()

    async def end(self) -> None:
        """End the response."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; if the client goes away first, cancel it and raise ClientGone."""
    if isinstance(receive, Receiving):
        await _until_told(receive, work)
    else:
        await _until_received(receive, work)


async def _until_told(receive: Receiving, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` in this task, which our own server interrupts when the client goes; not at all if it has gone."""
    if receive.why_gone:  # a cancel of work that never waits would hit what comes after it
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
            raise ClientGone("the client went away")
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
