"""The bytes of an answer, and what the app receives of a body and a client's disconnect."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from scheduler.http.exchange import HttpExchange

pytestmark = pytest.mark.anyio
BODY = "http.response.body"


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.aborted = False

    def write(self, content: bytes) -> None:
        self.written.append(content)

    def abort(self) -> None:
        self.aborted = True


def _exchange(method: str = "GET", version: str = "1.1", expects: bool = False) -> tuple[HttpExchange, Wire, list[str]]:
    wire, answered = Wire(), list[str]()
    scope = {"type": "http", "method": method, "http_version": version, "path": "/", "headers": []}
    transport: Any = wire
    exchange = HttpExchange(
        scope, transport, [(b"date", b"now")], lambda: answered.append("answered"), lambda: None,
        keep_alive=version == "1.1", expects=expects,
    )  # fmt: skip
    return exchange, wire, answered


def _app(status: int, headers: list[tuple[bytes, bytes]], *parts: bytes) -> Callable[..., Any]:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for part in parts[:-1]:
            await send({"type": BODY, "body": part, "more_body": True})
        await send({"type": BODY, "body": parts[-1]})

    return app


async def test_the_head_is_sent_with_the_first_chunk() -> None:
    exchange, wire, answered = _exchange()

    await exchange.run(_app(200, [(b"x", b"y")], b"abc", b"", b"d" * 17, b""))

    assert wire.written == [
        b"HTTP/1.1 200 OK\r\ndate: now\r\nx: y\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"11\r\n" + b"d" * 17 + b"\r\n",
        b"0\r\n\r\n",
    ]
    assert answered == ["answered"]


async def test_a_known_length_needs_no_chunks() -> None:
    exchange, wire, _ = _exchange()

    await exchange.run(_app(404, [(b"content-length", b"4")], b"ab", b"cd"))

    assert b"".join(wire.written) == b"HTTP/1.1 404 Not Found\r\ndate: now\r\ncontent-length: 4\r\n\r\nabcd"
    assert not wire.aborted


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("GET", 204), ("GET", 304)])
async def test_an_answer_without_a_body_has_none(method: str, status: int) -> None:
    exchange, wire, answered = _exchange(method)

    await exchange.run(_app(status, [(b"content-length", b"4")] if method == "HEAD" else [], b"abcd"))

    assert b"".join(wire.written).endswith(b"\r\n\r\n")
    assert b"chunked" not in b"".join(wire.written)
    assert answered


async def test_http_1_0_gets_no_chunks_and_its_connection_is_closed() -> None:
    exchange, wire, _ = _exchange(version="1.0")

    await exchange.run(_app(200, [], b"ab", b"cd"))

    assert b"".join(wire.written) == b"HTTP/1.1 200 OK\r\ndate: now\r\nconnection: close\r\n\r\nabcd"
    assert not exchange.keep_alive


@pytest.mark.parametrize("parts", [0, 1])
async def test_an_answer_that_fails_midway_is_cut(parts: int) -> None:
    exchange, wire, answered = _exchange()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(parts):
            await send({"type": BODY, "body": b"x", "more_body": True})
        raise RuntimeError("broken")

    await exchange.run(app)

    assert wire.aborted
    assert answered == []


async def test_a_body_is_read_as_it_comes_and_its_end_is_reported_once() -> None:
    exchange, wire, _ = _exchange("POST", expects=True)
    exchange.feed(b"ab")
    first = await exchange.receive()
    waiting = asyncio.ensure_future(exchange.receive())
    await asyncio.sleep(0)
    exchange.feed(b"c")
    exchange.complete_body()
    second = await waiting
    third = asyncio.ensure_future(exchange.receive())
    await asyncio.sleep(0)
    exchange.leave("gone")

    assert [first["body"], first["more_body"]] == [b"ab", True]
    assert [second["body"], second["more_body"]] == [b"c", False]
    assert (await third)["type"] == "http.disconnect"
    assert wire.written == [b"HTTP/1.1 100 Continue\r\n\r\n"]


async def test_a_disconnect_is_reported_once_before_the_answer_ends() -> None:
    reported: list[str] = []
    early, late, finished = (_exchange()[0] for _ in range(3))
    early.receive.when_gone(lambda: reported.append("early"))
    early.leave("gone")
    late.leave("gone")
    late.receive.when_gone(lambda: reported.append("late"))
    finished.receive.when_gone(lambda: reported.append("finished"))
    await finished.run(_app(200, [], b"x"))
    finished.leave("gone")
    early.leave("gone")

    assert reported == ["early", "late"]
    assert early.receive.why_gone == "gone"


async def test_a_slow_reader_holds_the_app_until_it_reads_or_leaves() -> None:
    for free in (HttpExchange.resume, lambda exchange: exchange.leave("gone")):
        exchange, wire, _ = _exchange()
        exchange.pause()
        running = asyncio.ensure_future(exchange.run(_app(200, [], b"x")))
        await asyncio.sleep(0)
        held = list(wire.written)
        free(exchange)
        await running

        assert held == []
        assert bool(wire.written) == (not exchange.gone)


async def test_a_complete_unread_body_is_available_at_once() -> None:
    early, late = _exchange("POST")[0], _exchange("POST")[0]
    early.feed(b"ab")
    half = early.whole_body()
    early.complete_body()
    late.feed(b"ab")
    await late.receive()
    late.complete_body()

    assert [half, early.whole_body(), early.whole_body(), late.whole_body()] == [None, b"ab", None, None]
    early.leave("gone")
    assert (await early.receive())["type"] == "http.disconnect"
