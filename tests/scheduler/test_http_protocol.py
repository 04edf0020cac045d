"""Connections that a client holds without a whole request."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.types import Receive, Scope, Send

from scheduler import http_protocol
from scheduler.drain import Drain
from scheduler.server import listen, serve

pytestmark = pytest.mark.anyio
DEADLINE_S = 20.0
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer at once, whatever is still to come of the body."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def _connected(monkeypatch: pytest.MonkeyPatch, head_s: float) -> AsyncIterator[Streams]:
    monkeypatch.setattr(http_protocol.BoundedProtocol, "head_s", head_s)
    bound, stop = listen("127.0.0.1", 0), asyncio.Event()
    port = bound.getsockname()[1]
    serving = asyncio.create_task(serve(_answer, bound, Drain(), shutdown_timeout_s=1.0, stop=stop))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield reader, writer
    finally:
        writer.close()
        stop.set()
        await serving


async def _until_closed(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(-1)
    except ConnectionError:
        return b""


async def _write_for_ever(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"1\r\nx\r\n")
        await writer.drain()
        await asyncio.sleep(0)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost:", GET + b"GE"])
async def test_a_head_that_does_not_come_closes_the_connection(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    async with _connected(monkeypatch, 0.1) as (reader, writer):
        writer.write(sent)
        await _until_closed(reader)


async def test_an_endless_body_that_is_answered_already_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _connected(monkeypatch, 0.1) as (reader, writer):
        writer.write(POST)
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        with pytest.raises(ConnectionError):
            await _write_for_ever(writer)


async def test_one_connection_serves_requests_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _connected(monkeypatch, DEADLINE_S) as (reader, writer):
        for request in (GET, POST + b"1\r\nx\r\n0\r\n\r\n", GET):
            writer.write(request)
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
