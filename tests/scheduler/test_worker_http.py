"""HTTP with a worker: how answers are read however they are split, and which connections are reused."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from scheduler.workers.http import WorkerHttp
from tests.scheduler.virtual_time import until
from wire.errors import (
    ConfigError,
    DeadlineExceeded,
    Incompatible,
    InstanceLost,
    InternalError,
    InvalidRequest,
    NoCapacity,
    PdserveError,
    Unavailable,
)

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM = HEAD + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (b"data: 1\n\n", b"data: ", b"2\n\n", b""))
EVENTS = b"data: 1\n\ndata: 2\n\n"


class Script:
    """A server that sends one written answer for each request, in pieces of `size` bytes; b"" closes instead."""

    def __init__(self, answers: Sequence[bytes], size: int = 2**20) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.num_connections = self.num_lost = 0
        self._size = size

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0)
                for at in range(0, len(answer), self._size):
                    writer.write(answer[at : at + self._size])
                    await asyncio.sleep(0)
                if not answer or answer.endswith(b"<"):
                    break
        except (asyncio.IncompleteReadError, ConnectionResetError):  # reset: what was sent last was not read
            self.num_lost += 1
        finally:
            writer.close()


@asynccontextmanager
async def scripted(*answers: bytes, size: int = 2**20, api_key: str = "") -> AsyncIterator[tuple[Script, WorkerHttp]]:
    """Serve the answers; on exit close both ends."""
    script = Script(answers, size)
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    http = WorkerHttp(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", api_key=api_key)
    try:
        yield script, http
    finally:
        await http.close()
        server.close()


async def _stream(http: WorkerHttp, feed: Callable[[bytes], None] | None = None) -> bytes:
    found = bytearray()
    await http.post_stream("/v1/completions", b"{}", {"X-Request-Id": "r"}, feed or found.extend)
    return bytes(found)


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.anyio
async def test_a_stream_arrives_whole_however_its_bytes_are_cut(size: int) -> None:
    async with scripted(STREAM, b"HTTP/1.1 103 Early Hints\r\n\r\n" + STREAM, size=size, api_key="k") as (script, http):
        assert [await _stream(http), await _stream(http)] == [EVENTS, EVENTS]
        assert script.num_connections == 1
        head, _, body = script.requests[0].partition(b"\r\n\r\n")
        lines = [b"POST /v1/completions HTTP/1.1", b"Authorization: Bearer k", b"X-Request-Id: r", b"Content-Length: 2"]
        assert [line in head.split(b"\r\n") for line in lines] == [True] * 4
        assert body == b"{}"


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (b"", InstanceLost, "closed before the answer"),
        (HEAD + b"9\r\ndata: 1\n\n\r\n<", InstanceLost, "not HTTP|was complete"),
        (HEAD + b"9\r\ndata<", InstanceLost, "was complete"),
        (b"SSH-2.0-OpenSSH_9.6\r\n<", InstanceLost, "not HTTP"),
        (OK, Incompatible, "not an event stream"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", InstanceLost, "not HTTP"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://x\r\nContent-Length: 0\r\n\r\n", Incompatible, "answered 302"),
        (b"HTTP/1.1 400 No\r\nContent-Length: 26\r\n\r\n" + b'{"error":{"message":"no"}}', InvalidRequest, "^no$"),
        (b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n", Incompatible, "--worker-api-key-file"),
        (b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n", NoCapacity, "429"),
        (b"HTTP/1.0 503 Service Unavailable\r\n\r\nsoon<", Unavailable, "503: soon"),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 9999\r\n\r\n" + 5000 * b"x", InternalError, "500: xxx"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [1000, 1], ids=["whole", "bytes"])
@pytest.mark.anyio
async def test_an_answer_that_is_no_stream_names_what_came(
    answer: bytes, error: type[PdserveError], message: str, size: int
) -> None:
    async with scripted(answer, OK, size=size) as (script, http):
        with pytest.raises(error, match=message):
            await _stream(http)
        assert await http.get_json("/version", 5.0) == {}
        assert len(script.requests) == 2


@pytest.mark.anyio
async def test_a_second_answer_does_not_wait_for_the_next_request() -> None:
    async with scripted(OK + OK.replace(b"{}", b"[]"), OK) as (_, http):
        with pytest.raises(InstanceLost, match="not HTTP"):
            await http.get_json("/version", 5.0)
        assert await http.get_json("/version", 5.0) == {}


@pytest.mark.anyio
async def test_leaving_a_stream_early_closes_its_connection() -> None:
    async with scripted(HEAD, STREAM) as (script, http):
        task = asyncio.create_task(_stream(http))
        await until(lambda: len(script.requests) == 1)
        task.cancel()
        await until(lambda: script.num_lost == 1)
        assert await _stream(http) == EVENTS

    def refuse(_: bytes) -> None:
        raise InvalidRequest("enough")

    async with scripted(HEAD + b"1\r\nx\r\n") as (script, http):
        with pytest.raises(InvalidRequest, match="enough"):
            await _stream(http, refuse)
        await until(lambda: script.num_lost == 1)


@pytest.mark.anyio
async def test_a_closed_idle_connection_costs_a_get_nothing() -> None:
    async with scripted(OK, b"", OK, OK, b"", OK) as (script, http):
        for _ in range(2):
            assert await http.get_json("/metrics", 5.0) == {}
        assert (script.num_connections, len(script.requests)) == (2, 3)
        assert await http.get_json("/metrics", 5.0) == {}
        with pytest.raises(InstanceLost, match="closed before the answer"):  # a POST may have been executed
            await http.post_json("/v1/completions", b"{}", {})


@pytest.mark.parametrize("lines", ["Connection: close\r\n", ""], ids=["close", "idle too long"])
@pytest.mark.anyio
async def test_a_connection_that_the_worker_may_close_is_left(lines: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.workers.http._KEEP_ALIVE_S", 0.0)
    answer = f"HTTP/1.1 200 OK\r\n{lines}Content-Length: 2\r\n\r\n{{}}".encode()
    async with scripted(answer, answer) as (script, http):
        await http.get("/health", 5.0)
        await http.get("/health", 5.0)
        assert script.num_connections == 2
        await until(lambda: script.num_lost >= 1)


@pytest.mark.anyio
async def test_a_worker_that_is_not_there_or_silent_is_named() -> None:
    async with scripted(HEAD) as (_, http):
        with pytest.raises(DeadlineExceeded, match=r"/metrics did not answer within 0\.01 s"):
            await http.get("/metrics", 0.01)
        port = int(http.url.rpartition(":")[2])
    with pytest.raises(InstanceLost, match=f"127.0.0.1:{port}/health: "):
        await WorkerHttp(f"http://127.0.0.1:{port}").get("/health", 5.0)


def test_a_key_that_no_header_can_carry_is_refused() -> None:
    with pytest.raises(ConfigError, match="line break"):
        WorkerHttp("http://h:1", api_key="a\nb")
