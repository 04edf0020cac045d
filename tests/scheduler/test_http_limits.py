"""What one connection may cost whatever it sends, and that a client's disconnect is noticed in any case."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from scheduler.http.bad_request import MAX_HEAD_BYTES
from scheduler.http.drain import Drain
from scheduler.http.exchange import MAX_DROPPED_BYTES, HttpExchange, Receiving
from scheduler.http.listener import listen
from scheduler.http.protocol import SLICE_BYTES, HttpProtocol
from scheduler.http.server import serve

pytestmark = pytest.mark.anyio
DEADLINE_S = 300.0
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
LARGE = 16 * 2**20


@dataclass
class App:
    """Answers once it may, and records what it has received."""

    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    has_body: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    scopes: list[Scope] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        while (await receive()).get("more_body"):
            pass
        self.has_body.set()
        assert isinstance(receive, Receiving)
        receive.when_gone(self.gone.set)
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"kk"})


class Refusing(App):
    """Answers before it has read the body."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"no"})


@dataclass
class Pipe:
    """A transport whose client has not read so many bytes yet."""

    unread: int
    aborted: bool = False

    def get_write_buffer_size(self) -> int:
        return self.unread

    def write(self, content: bytes) -> None:
        self.unread += len(content)

    def abort(self) -> None:
        self.aborted = True


@dataclass
class PrefillHeld:
    """A transport that can pause its client."""

    is_paused: bool = False
    is_closed: bool = False

    def abort(self) -> None: ...

    def write(self, content: bytes) -> None: ...

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        self.is_closed = True

    def get_extra_info(self, _: str) -> None:
        return None

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


@dataclass
class Timers:
    """An event loop whose timers fire on demand."""

    calls: list[Callable[[], None]] = field(default_factory=list)

    def call_later(self, _: float, call: Callable[[], None]) -> None:
        self.calls.append(call)


@asynccontextmanager
async def _connect(app: App) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    bound, stop = listen("127.0.0.1", 0), asyncio.Event()
    address = bound.getsockname()[:2]
    serving = asyncio.create_task(serve(app, bound, Drain(), shutdown_timeout_s=1.0, stop=stop))
    reader, writer = await asyncio.open_connection(*address)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield reader, writer
    finally:
        app.may_answer.set()
        writer.transport.abort()
        stop.set()
        await serving


async def _write_until_cut(writer: asyncio.StreamWriter, part: bytes, maximum: int) -> int:
    """Return how many bytes were written before the connection broke; at most `maximum`."""
    written = 0
    with suppress(ConnectionError):
        while written < maximum:
            writer.write(part)
            await writer.drain()
            written += len(part)
            await asyncio.sleep(0)
    return written


@pytest.mark.parametrize("size", [10, 100_000, 3_000_000])
@pytest.mark.parametrize("behind", [b"", b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"])
async def test_a_disconnect_is_noticed_however_long_the_body_was(size: int, behind: bytes) -> None:
    app = App()
    async with _connect(app) as (_, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n" % (behind, size) + b"a" * size)
        await app.has_body.wait()
        writer.transport.abort()

        await app.gone.wait()


@pytest.mark.parametrize(
    "begun",
    [
        pytest.param(b"0\r\nX: ", id="a trailer"),
        pytest.param(b"1;x=", id="a chunk's extension"),
        pytest.param(b"0;x=", id="the last chunk's extension"),
    ],
)
async def test_endless_data_behind_a_head_closes_the_connection(begun: bytes) -> None:
    async with _connect(App()) as (_, writer):
        writer.write(CHUNKED + begun)

        assert await _write_until_cut(writer, b"a" * 65_536, LARGE) < LARGE


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"400"),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", b"400"),
        (b"GET / HTTP/0.9\r\nHost: a\r\n\r\n", b"400"),
        (b"GET / HTTP/1.0\r\n\r\n", b"200"),
        (b"GET / HTTP/1.1\r\nHost:\r\n\r\n", b"200"),
    ],
)
async def test_a_request_is_of_http_1_and_names_one_host(head: bytes, status: bytes) -> None:
    app = App()
    app.may_answer.set()
    async with _connect(app) as (reader, writer):
        writer.write(head)

        assert (await reader.readline()).split()[1] == status
    assert len(app.scopes) == (status == b"200")


async def test_trailers_without_an_end_close_the_connection() -> None:
    async with _connect(App()) as (_, writer):
        writer.write(CHUNKED + b"0\r\n")

        assert await _write_until_cut(writer, b"a: b\r\n" * 10_000, LARGE) < LARGE


async def test_a_broken_body_of_an_answered_request_gets_no_second_answer() -> None:
    async with _connect(Refusing()) as (reader, writer):
        writer.write(CHUNKED)
        assert (await reader.readuntil(b"no")).startswith(b"HTTP/1.1 413")
        writer.write(b"nonsense\r\n")

        with suppress(ConnectionError):
            assert await reader.read() == b""


@pytest.mark.parametrize("body", [b"nonsense\r\n", b"-1\r\n", b"1\r\naX", b"fffffffffffffffff\r\n"])
async def test_an_invalid_body_encoding_is_refused(body: bytes) -> None:
    app = App()
    async with _connect(app) as (reader, writer):
        writer.write(CHUNKED + body)
        answer = await reader.read()

    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1 ") == 1


async def test_trailers_are_not_headers() -> None:
    app = App()
    async with _connect(app) as (reader, writer):
        writer.write(CHUNKED + b"1\r\na\r\n0\r\nAuthorization: Bearer x\r\nX-Vllm-Priority: -9\r\n\r\n")
        app.may_answer.set()
        await reader.readuntil(b"kk")

    assert [name for name, _ in app.scopes[0]["headers"]] == [b"host", b"transfer-encoding"]


@pytest.mark.parametrize("count", [2, 70, 3000])
async def test_requests_sent_at_once_are_all_answered(count: int) -> None:
    app = App()
    async with _connect(app) as (reader, writer):
        writer.write(GET * count)
        await app.has_body.wait()
        app.may_answer.set()
        for _ in range(count):
            assert (await reader.readuntil(b"kk")).startswith(b"HTTP/1.1 200")


async def test_few_requests_are_read_ahead_of_one_in_flight() -> None:
    transport: Any = PrefillHeld()
    config: Any = SimpleNamespace(loaded=True, loaded_app=App(), timeout_keep_alive=30)
    protocol = HttpProtocol(config, ServerState(), {}, asyncio.get_running_loop())
    protocol.connection_made(transport)
    protocol.data_received(GET * 10_000)

    assert 1 <= len(protocol._waiting) <= SLICE_BYTES // len(GET)
    assert transport.is_paused
    protocol.connection_lost(None)


@pytest.mark.parametrize(
    ("behind", "status"),
    [
        pytest.param(b"nonsense\r\n\r\n", b"400", id="no HTTP"),
        pytest.param(b'{"more": "than Content-Length says"}', b"400", id="the rest of a body"),
        pytest.param(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n", b"431", id="too many fields"),
        pytest.param(CHUNKED + b"nonsense\r\n", b"400", id="a broken body"),
        pytest.param(b"\0" * LARGE, b"400", id="much of it"),
    ],
)
async def test_pending_answers_are_sent_before_the_connection_closes(behind: bytes, status: bytes) -> None:
    app = App()
    async with _connect(app) as (reader, writer):
        writer.write(POST + GET + behind)
        await app.has_body.wait()
        app.may_answer.set()
        for _ in range(2):
            assert (await reader.readuntil(b"kk")).startswith(b"HTTP/1.1 200")
        assert (await reader.readuntil(b"}}")).split()[1] == status


@pytest.mark.parametrize(
    ("head", "stays_open"),
    [
        (b"Content-Length: 10\r\n", True),
        (b"Content-Length: 10\r\nExpect: 100-continue\r\n", False),  # with Expect it may leave the body out
        (b"Content-Length: %d\r\n" % LARGE, False),
        (b"Transfer-Encoding: chunked\r\n", False),
    ],
)
async def test_an_early_answer_reads_little_of_the_rest(head: bytes, stays_open: bool) -> None:
    async with _connect(Refusing()) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n")
        answer = await reader.readuntil(b"no")
        assert (b"connection: close" in answer) is not stays_open
        if stays_open:
            writer.write(b"a" * 10 + GET)
            assert (await reader.readuntil(b"no")).startswith(b"HTTP/1.1 413")
        else:
            assert await _write_until_cut(writer, b"a" * 65_536, 4 * LARGE) < 4 * LARGE


async def test_after_its_last_answer_a_client_may_send_one_mebibyte() -> None:
    transport: Any = PrefillHeld()
    config: Any = SimpleNamespace(loaded=True, loaded_app=Refusing(), timeout_keep_alive=30)
    state = ServerState()
    protocol = HttpProtocol(config, state, {}, asyncio.get_running_loop())
    protocol.connection_made(transport)
    protocol.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % LARGE)
    await asyncio.gather(*state.tasks)

    for _ in range(2**20 // 65_536):
        assert not transport.is_closed
        protocol.data_received(b"a" * 65_536)
    assert (MAX_DROPPED_BYTES, transport.is_closed) == (2**20, False)
    protocol.data_received(b"a")
    assert transport.is_closed
    protocol.connection_lost(None)


async def test_a_long_head_behind_a_chunked_body_is_not_called_endless() -> None:
    """The end of a body and the start of a head came at once: those bytes are not all of the head."""
    app = App()
    app.may_answer.set()
    body = b"a" * (MAX_HEAD_BYTES + 10)
    async with _connect(app) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nX: ")
        await writer.drain()
        writer.write(b"y\r\nContent-Length: %d\r\n\r\n" % len(body) + body + b"GET / HTTP/1.1\r\nHost: x\r\nX: ")
        await reader.readuntil(b"kk")
        writer.write(b"y\r\n\r\n")

        assert (await reader.readuntil(b"kk")).startswith(b"HTTP/1.1 200")


def _paused(unread: int) -> tuple[HttpProtocol, Pipe, Timers]:
    """A protocol whose client has not read so many bytes yet."""
    pipe, timers = Pipe(unread), Timers()
    config: Any = SimpleNamespace(loaded=True, loaded_app=None, timeout_keep_alive=30)
    loop: Any = timers
    transport: Any = pipe
    protocol = HttpProtocol(config, ServerState(), {}, loop, reader_s=5.0)
    protocol.transport = transport
    protocol.pause_writing()
    return protocol, pipe, timers


def test_slow_readers_get_time_and_stalled_ones_do_not() -> None:
    for read_each_time, ends_after in ((0, 1), (9, 1), (10, 10), (50, 2)):
        _, pipe, timers = _paused(1000)
        periods = 0
        while pipe.unread and not pipe.aborted:
            pipe.unread -= read_each_time * 10
            timers.calls.pop()()
            periods += 1

        assert (pipe.aborted, periods) == (ends_after == 1, ends_after)


@pytest.mark.parametrize(("read_each_time", "is_slow"), [(150, False), (90, True)])
def test_a_reader_slower_than_its_stream_gets_time_too(read_each_time: int, is_slow: bool) -> None:
    protocol, pipe, timers = _paused(1000)
    transport: Any = pipe
    scope = {"type": "http", "method": "POST", "http_version": "1.0", "path": "/"}
    protocol._exchange = stream = HttpExchange(
        scope, transport, [], lambda: None, lambda: None, keep_alive=True, expects=False
    )
    stream.start(200, [])
    for _ in range(5):
        if not pipe.aborted:
            stream.write(b"x" * 200)
            pipe.unread -= read_each_time
            timers.calls.pop()()

    assert pipe.aborted == is_slow
