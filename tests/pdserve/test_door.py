"""`pdserve door`: what its clients get when servers break off, refuse, or are silent."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from pdserve import cli, door
from pdserve.ports import free_ports
from pdserve.stream_proxy import ProxyLimits, StreamProxy
from scheduler.http.drain import Drain
from scheduler.http.listener import listen
from scheduler.http.server import serve

DEADLINE_S = 60.0
ID = "5" * 32
KEPT = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-pdserve-stream: " + ID.encode() + b"\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
PLAIN = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
NOT_FOUND = b'HTTP/1.1 404 Not Found\r\ncontent-length: 28\r\n\r\n{"error":{"message":"gone"}}'
UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"


def events(*numbers: int) -> bytes:
    return b"".join(b"data: %d\n\n" % number for number in numbers)


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


def stream(*parts: bytes, ends: bool = True) -> bytes:
    """Return an answer of parts of a kept stream; without an end its connection breaks."""
    return KEPT + CHUNKED + b"".join(map(chunk, parts)) + (b"0\r\n\r\n" if ends else b"")


@dataclass
class Server:
    """Answers each request by the next of its answers, None with silence, and closes the connection."""

    answers: list[bytes | None]
    requests: list[str] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.requests.append(" ".join(head.split(" ")[:2]))
        self.headers.append(head.lower())
        if head.startswith("DELETE"):
            self.ended.set()
        answer = self.answers.pop(0)
        writer.write(KEPT + CHUNKED + chunk(events(1)) if answer is None else answer)
        await writer.drain()
        if answer is None:
            await reader.read()
            self.left.set()
        writer.close()


@asynccontextmanager
async def proxy_to(*servers: Server, wait_s: float = 10.0, silence_s: float = 10.0) -> AsyncIterator[httpx.AsyncClient]:
    """Serve the proxy in front of these, and return its client."""
    listening = [await asyncio.start_server(server.serve, "127.0.0.1", 0) for server in servers]
    for server, opened in zip(servers, listening, strict=True):
        server.url = f"http://127.0.0.1:{opened.sockets[0].getsockname()[1]}"
    stop, bound, drain = asyncio.Event(), listen("127.0.0.1", 0), Drain()
    limits = ProxyLimits(wait_s, silence_s, max_body_bytes=1000)
    async with StreamProxy([server.url for server in servers], limits, drain) as app:
        task = asyncio.create_task(serve(app, bound, drain, shutdown_timeout_s=1.0, stop=stop))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        try:
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=DEADLINE_S) as client:
                yield client
        finally:
            stop.set()
            await asyncio.wait_for(task, DEADLINE_S)
            for opened in listening:
                opened.close()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), DEADLINE_S))


BROKEN: list[tuple[str, Sequence[bytes | None]]] = [
    ("undisturbed", [stream(events(1, 2), events(3, 4))]),
    ("between events", [stream(events(1, 2), ends=False), stream(events(3, 4))]),
    ("within an event", [stream(events(1), b"data: 2\n", ends=False), stream(events(2, 3, 4))]),
    ("before the first event", [stream(ends=False), stream(events(1, 2, 3, 4))]),
    ("before its head", [b"", stream(events(1, 2, 3, 4))]),
    ("at a server that has no answer yet", [stream(events(1, 2), ends=False), UNAVAILABLE, stream(events(3, 4))]),
    ("twice", [stream(events(1), ends=False), b"", stream(events(2, 3), ends=False), stream(events(4))]),
    ("after comments", [stream(b": keep-alive\n\n", events(1), ends=False), stream(events(2, 3, 4))]),
    ("by silence", [None, stream(events(2, 3, 4))]),
]


@pytest.mark.parametrize("answers", [answers for _, answers in BROKEN], ids=[name for name, _ in BROKEN])
@pytest.mark.parametrize("num_servers", [1, 2])
def test_a_stream_is_whole_however_its_answers_break(answers: Sequence[bytes | None], num_servers: int) -> None:
    async def test() -> None:
        shared = list(answers)
        servers = [Server(shared) for _ in range(num_servers)]
        async with proxy_to(*servers, silence_s=0.3) as client:
            answer = await client.post("/v1/completions?x=1", json={"stream": True}, headers={"Authorization": "k"})

            shown = [line for line in answer.text.split("\n\n") if line.startswith("data")]
            assert shown == [f"data: {number}" for number in (1, 2, 3, 4)]
            assert answer.headers["x-pdserve-stream"] == ID
            assert not shared
            sent = [head for server in servers for head in server.headers]
            assert all("authorization: k" in head for head in sent)
            assert sum("x-pdserve-keep-stream: if-possible" in head for head in sent) == len(answers)

    run(test)


def test_a_resumed_request_names_the_events_that_the_client_has() -> None:
    async def test() -> None:
        server = Server([stream(events(1, 2), b"data: 3", ends=False), stream(events(3))])
        async with proxy_to(server) as client:
            await client.post("/v1/completions", json={})

        assert server.requests == ["POST /v1/completions", f"GET /v1/streams/{ID}?after=2"]

    run(test)


def test_what_cannot_be_continued_ends_with_an_error() -> None:
    async def test() -> None:
        lost = Server([stream(events(1), ends=False), NOT_FOUND])
        async with proxy_to(lost) as client:
            answer = await client.post("/v1/completions", json={})
        assert answer.text == 'data: 1\n\ndata: {"error":{"message":"gone"}}\n\n'

        gone = Server([stream(events(1), ends=False), *[UNAVAILABLE] * 100])
        async with proxy_to(gone, wait_s=0.3) as client:
            answer = await client.post("/v1/completions", json={})
        assert "no server can go on with this stream" in answer.text

        refusing = Server([b""] * 100)
        async with proxy_to(refusing, wait_s=0.3) as client:
            answer = await client.post("/v1/completions", json={})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")

    run(test)


def test_other_answers_pass_unchanged_and_once_begun_are_not_repeated() -> None:
    async def test() -> None:
        server = Server([PLAIN, PLAIN.replace(b"length: 2", b"length: 3"), PLAIN])
        async with proxy_to(server) as client:
            answer = await client.get("/v1/models")
            assert (answer.status_code, answer.text, answer.headers["content-length"]) == (200, "{}", "2")
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get("/v1/models")
            refused = await client.post("/v1/completions", content=b"x" * 1001)
            assert (refused.status_code, "1000 bytes" in refused.text) == (413, True)

        assert server.requests == ["GET /v1/models", "GET /v1/models"]
        assert "x-pdserve-keep-stream" not in server.headers[0]

    run(test)


def test_a_client_that_leaves_ends_its_stream() -> None:
    async def test() -> None:
        server = Server([None, PLAIN])
        async with proxy_to(server) as client:
            async with client.stream("POST", "/v1/completions", json={}) as answer:
                async for _ in answer.aiter_bytes():
                    break
            await server.left.wait()
            await server.ended.wait()

        assert server.requests[1] == f"DELETE /v1/streams/{ID}"

    run(test)


def test_a_part_of_a_body_is_not_sent_on() -> None:
    async def test() -> None:
        server = Server([PLAIN])
        async with proxy_to(server) as client:
            host, port = str(client.base_url.host), int(client.base_url.port or 0)
            _, writer = await asyncio.open_connection(host, port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 10\r\n\r\n{}")
            await writer.drain()
            writer.close()
            await writer.wait_closed()
            assert (await client.get("/health")).status_code == 200

        assert server.requests == ["GET /health"]

    run(test)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--to", "127.0.0.1:9000"), "is not the URL of a server"),
        (("--to", "http://h/v1"), "is not the URL of a server"),
        (("--wait", "0"), "--wait is 0.0, but must be"),
    ],
)
def test_wrong_flags_are_refused(flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["door", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_port_in_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    with listen("127.0.0.1", port):
        assert cli.main(["door", "--port", str(port)]) == 2
    assert str(port) in capsys.readouterr().err


def test_the_defaults_lead_to_the_cluster_of_up() -> None:
    assert door.parse([]).to == ("http://127.0.0.1:9000",)
