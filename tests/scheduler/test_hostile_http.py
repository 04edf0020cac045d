"""Attacks on HTTP itself: forms, ranges, odd methods, endless, lying and slow bodies, and held connections.

The app on a real socket, with hand-written bytes; during each attack a well-behaved client is answered.
"""

import asyncio
import random
import string
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import pytest

from scheduler.app import build_app, open_routes
from scheduler.http.listener import listen
from scheduler.http.server import serve as serve_app
from scheduler.model.kind import ModelKind
from tests.scheduler.conftest import Serve, Served
from wire.errors import Overloaded

pytestmark = pytest.mark.anyio
DEADLINE_S = 300.0
CHUNK = b"10000\r\n" + b" " * 65_536 + b"\r\n"


@dataclass(frozen=True, slots=True)
class Listening:
    """A server on a free port, and the app behind it."""

    served: Served
    port: int

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection."""
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def answer(self, sent: bytes) -> bytes:
        """Send bytes and return the first answer's head and body."""
        reader, writer = await self.connect()
        writer.write(sent)
        async with asyncio.timeout(DEADLINE_S):
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            body = await reader.readexactly(int(length)) if length and not sent.startswith(b"HEAD") else b""
        writer.close()
        return head + body

    async def is_well(self) -> bool:
        """Whether a well-behaved client gets its answer."""
        body = b'{"model": "%s", "prompt": "hi"}' % self.served.model.encode()
        return (await self.answer(_post("/v1/completions", body))).startswith(b"HTTP/1.1 200")


@asynccontextmanager
async def _listening(serve: Serve, **options: float) -> AsyncIterator[Listening]:
    async with serve("hello", **options) as served:
        bound, stop = listen("127.0.0.1", 0), asyncio.Event()
        port = bound.getsockname()[1]
        timeout_s = served.context.config.options.client_timeout
        task = asyncio.create_task(
            serve_app(
                build_app(served.context), bound, served.context.drain, shutdown_timeout_s=1, stop=stop,
                client_timeout_s=timeout_s,
            )
        )  # fmt: skip
        try:
            yield Listening(served, port)
        finally:
            stop.set()
            await asyncio.wait_for(task, DEADLINE_S)


def _post(path: str, body: bytes = b"", *headers: str) -> bytes:
    fields = "".join(f"{header}\r\n" for header in headers)
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{fields}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize(
    "kind", ["multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "MultiPart/x"]
)
async def test_no_route_accepts_a_form(serve: Serve, kind: str) -> None:
    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="../../x"\r\n\r\n1\r\n--x--\r\n'
    async with _listening(serve) as server:
        opened = open_routes(server.served.context.config.options)
        routes = [one for one in opened if ModelKind.TEXT in one.needs and "{" not in one.path]
        answers = {
            route.path: _status(await server.answer(_post(route.path, form, f"Content-Type: {kind}")))
            for route in routes
        }
        assert await server.is_well()

    body_paths = {route.path for route in routes if route.methods == "POST"}
    assert {path for path, status in answers.items() if status == 415} == body_paths
    assert set(answers.values()) <= {405, 415, 200}


@pytest.mark.parametrize("value", ["bytes=0-", "bytes=" + ",".join(["0-"] * 5000), "bytes=-1", "lines=1-2"])
async def test_a_range_request_gets_the_whole_answer(serve: Serve, value: str) -> None:
    async with _listening(serve) as server:
        ranged = await server.answer(f"GET /v1/models HTTP/1.1\r\nHost: x\r\nRange: {value}\r\n\r\n".encode())
        plain = await server.answer(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")

    assert _status(ranged) == 200
    assert ranged.partition(b"\r\n\r\n")[2] == plain.partition(b"\r\n\r\n")[2]


async def test_random_methods_and_paths_make_no_new_series(serve: Serve) -> None:
    rng = random.Random(3)
    async with _listening(serve) as server:
        series = []
        for _ in range(2):
            for _ in range(150):
                path = "/" + "".join(rng.choices(string.ascii_letters + "/.%~", k=20)).replace("%", "%41")
                method = rng.choice(("GET", "POST", "PROPFIND", "PURGE", "TRACE", "OPTIONS", "M-SEARCH"))
                answer = await server.answer(
                    f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode()
                )
                assert _status(answer) in (400, 404, 405)
            page = server.served.context.metrics.render()
            series.append({line.rpartition(b" ")[0] for line in page.splitlines() if b"http_requests_total{" in line})

    assert series[0] == series[1]
    assert len(series[0]) <= 20


async def test_an_endless_chunked_body_is_cut_at_the_limit(serve: Serve) -> None:
    async with _listening(serve, max_body_bytes=2**20) as server:
        reader, writer = await server.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        answer = asyncio.ensure_future(reader.readuntil(b"\r\n\r\n"))
        with suppress(ConnectionError):
            while not answer.done():
                writer.write(CHUNK)
                await writer.drain()
        status = _status(await asyncio.wait_for(answer, DEADLINE_S))
        writer.transport.abort()

        assert status == 413
        assert await server.is_well()


@pytest.mark.parametrize("length", ["1000000000000000000", "18446744073709551615", "0" * 5000 + "16777217"])
async def test_a_declared_length_past_the_limit_is_413_at_once(serve: Serve, length: str) -> None:
    async with _listening(serve) as server:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\nExpect: 100-continue\r\n\r\n"
        answer = await server.answer(head.encode())

        assert _status(answer) == 413
        assert b"connection: close" in answer
        assert await server.is_well()


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 16000000\r\n\r\n" + b" " * 70_000,
    ],
)
async def test_a_body_that_stops_arriving_is_refused_with_a_reason(serve: Serve, sent: bytes) -> None:
    async with _listening(serve, client_timeout=0.1) as server:
        answer = await server.answer(sent)

        assert _status(answer) == 408
        assert b"the body took longer than 0.1 s" in answer
        assert await server.is_well()


async def test_a_body_is_read_to_its_declared_length(serve: Serve) -> None:
    async with _listening(serve) as server:
        reader, writer = await server.connect()
        body = b'{"model": "%s", "prompt": "hi"}' % server.served.model.encode()
        writer.write(_post("/v1/completions", body) + b'{"more": "than it said"}\r\n\r\n')
        async with asyncio.timeout(DEADLINE_S):
            answers = await reader.read()
        writer.close()

        assert answers.count(b"HTTP/1.1 ") <= 2
        assert b"Traceback" not in answers
        assert await server.is_well()


async def test_hundreds_of_held_connections_block_no_other_client(serve: Serve) -> None:
    halves = (b"", b"G", b"GET / HTTP/1.1\r\nX: ", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n{")
    async with _listening(serve) as server:
        held = [await server.connect() for _ in range(300)]
        for at, (_, writer) in enumerate(held):
            writer.write(halves[at % len(halves)])
        answers = [await server.is_well() for _ in range(5)]
        for _, writer in held:
            writer.transport.abort()

    assert answers == [True] * 5


async def test_a_stream_to_a_client_that_does_not_read_ends(serve: Serve) -> None:
    async with _listening(serve, client_timeout=0.2) as server:
        _, writer = await server.connect()
        body = b'{"model": "%s", "prompt": "hi", "stream": true, "max_tokens": 400}' % server.served.model.encode()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(_post("/v1/completions", body) * 50)
        assert await server.is_well()
        writer.transport.abort()
        assert await server.served.context.drain.wait_idle(DEADLINE_S)


async def test_a_full_queue_refuses_a_body_unread(
    serve: Serve,
) -> None:
    async with _listening(serve) as server:
        server.served.dispatcher.refuse_with = Overloaded("the queue is full", retry_after_s=3)
        unread = b'{"model": "unknown", "prompt": "' + b"x" * 300_000 + b'"'  # neither JSON nor a known model
        reader, writer = await server.connect()
        async with asyncio.timeout(DEADLINE_S):
            writer.write(_post("/v1/completions", unread))
            head = await reader.readuntil(b"\r\n\r\n")
        writer.close()

        assert head.startswith(b"HTTP/1.1 429")
        assert b"retry-after: 3" in head.lower()
        assert not server.served.dispatcher.requests

        server.served.dispatcher.refuse_with = None
        assert await server.is_well()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/completions", 429), ("/v1/chat/completions", 429), ("/v1/messages", 529), ("/v1/responses", 429),
        ("/v1/embeddings", 429), ("/v1/score", 429), ("/score", 429), ("/inference/v1/generate", 429),
        ("/rerank", 429), ("/v1/rerank", 429), ("/v2/rerank", 429), ("/pooling", 429), ("/v2/embed", 429),
    ],
)  # fmt: skip
async def test_every_queued_route_refuses_unread_if_full(serve: Serve, path: str, status: int) -> None:
    async with _listening(serve) as server:
        server.served.dispatcher.refuse_with = Overloaded("the queue is full")

        assert (await server.answer(_post(path, b"no JSON"))).startswith(b"HTTP/1.1 %d" % status)
        assert (await server.answer(_post("/tokenize", b"no JSON"))).startswith(b"HTTP/1.1 400")
