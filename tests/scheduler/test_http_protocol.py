"""Connections that a client holds open without a complete request."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from starlette.types import Receive, Scope, Send

from scheduler.http import protocol as http_protocol
from scheduler.http import server
from scheduler.http.drain import Drain
from scheduler.http.listener import listen
from scheduler.http.server import serve

pytestmark = pytest.mark.anyio
DEADLINE_S = 300.0
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer at once, without waiting for the rest of the body."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def _connect(monkeypatch: pytest.MonkeyPatch, head_s: float) -> AsyncIterator[Streams]:
    monkeypatch.setattr(http_protocol.HttpProtocol, "head_s", head_s)
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
async def test_a_head_that_does_not_arrive_closes_the_connection(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    async with _connect(monkeypatch, 0.1) as (reader, writer):
        writer.write(sent)
        await _until_closed(reader)


async def test_an_endless_body_already_answered_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _connect(monkeypatch, DEADLINE_S) as (reader, writer):
        monkeypatch.setattr(http_protocol.HttpProtocol, "head_s", 0.1)  # for what follows the head
        writer.write(POST)
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        with pytest.raises(ConnectionError):
            await _write_for_ever(writer)


async def test_one_connection_serves_requests_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _connect(monkeypatch, DEADLINE_S) as (reader, writer):
        for request in (GET, POST + b"1\r\nx\r\n0\r\n\r\n", GET):
            writer.write(request)
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")


async def test_a_field_without_an_end_is_refused_and_costs_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _connect(monkeypatch, DEADLINE_S) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nX: ")
        answer = asyncio.create_task(_until_closed(reader))
        with suppress(ConnectionError):
            for _ in range(160):  # 10 MB
                writer.write(b"a" * 65_536)
                await writer.drain()

        assert (await answer)[:12] in (b"HTTP/1.1 431", b"")  # it may be lost to the reset that follows it


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 10_000 + b"\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 65_540 + b"\r\n\r\n", b"431"),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 126 + b"Host: x\r\n\r\n", b"200"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 60_000 + b"\r\n\r\n", b"200"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),
        (b"hello\r\n\r\n", b"400"),
        (b"GET / HTTP/9.9\r\n\r\n", b"400"),
        (b"CONNECT evil.example:80 HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", b"400"),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n bad: folded\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHo\x00st: x\r\n\r\n", b"400"),
    ],
)
async def test_a_head_over_a_limit_is_answered_in_the_envelope_and_closed(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, status: bytes
) -> None:
    async with _connect(monkeypatch, DEADLINE_S) as (reader, writer):
        writer.write(sent.replace(b"Host: x\r\n", b"Host: x\r\nConnection: close\r\n", 1))
        answer = await _until_closed(reader)

    assert answer.split(b" ", 2)[1] == status
    if status != b"200":
        assert b'{"error":{"message":' in answer
        assert b"connection: close" in answer


async def test_a_broken_pipelined_request_spoils_no_earlier_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _connect(monkeypatch, DEADLINE_S) as (reader, writer):
        writer.write(GET)
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.write(b"nonsense\r\n\r\n")

        assert (await _until_closed(reader)).startswith(b"HTTP/1.1 400")


async def test_requests_sent_at_once_are_answered_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _connect(monkeypatch, DEADLINE_S) as (reader, writer):
        writer.write((GET + POST + b"1\r\nx\r\n0\r\n\r\n") * 20)

        for _ in range(40):
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.0\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"])
async def test_connection_close_gets_one_answer_and_is_closed(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    async with _connect(monkeypatch, DEADLINE_S) as (reader, writer):
        writer.write(sent + GET)
        answer = await _until_closed(reader)

    assert (answer.count(b"HTTP/1.1 200"), answer.count(b"connection: close")) == (1, 1)


async def test_an_idle_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_KEEP_ALIVE_S", 0.05)
    async with _connect(monkeypatch, DEADLINE_S) as (reader, writer):
        writer.write(GET)
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")

        assert await _until_closed(reader) == b""


async def test_an_upgrade_to_another_protocol_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _connect(monkeypatch, DEADLINE_S) as (reader, writer):
        writer.write(
            GET.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n") + b"\x81\x05hello"
        )
        answer = await _until_closed(reader)

    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"ok")
