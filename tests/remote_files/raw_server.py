"""A server on loopback that sends exactly the bytes it is given, and records its requests."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from remote_files.addresses import AddressRules

LOOPBACK = AddressRules.of(["127.0.0.0/8", "::1"])
DEADLINE_S = 300.0


@dataclass
class Request:
    """One request as received, and its connection."""

    line: str
    headers: dict[str, str]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    body: bytes = b""

    @property
    def target(self) -> str:
        """The text between the method and the version."""
        return self.line.split(" ")[1]

    async def read_body(self, num_bytes: int | None = None) -> bytes:
        """Read the body, or that many bytes of it."""
        wanted = int(self.headers.get("content-length", "0")) if num_bytes is None else num_bytes
        self.body += await self.reader.readexactly(wanted)
        return self.body

    async def say(self, answer: bytes) -> None:
        """Send these bytes; raise ConnectionError if nobody receives them."""
        if self.writer.is_closing():
            raise ConnectionResetError
        self.writer.write(answer)
        await self.writer.drain()


Handler = Callable[[Request], Awaitable[None]]


@dataclass
class RawServer:
    """Where it listens, and its requests so far."""

    port: int
    requests: list[Request] = field(default_factory=list)

    def url(self, path: str = "/file", host: str = "127.0.0.1") -> str:
        """Return the URL of `path` here."""
        return f"http://{host}:{self.port}{path}"


@contextlib.asynccontextmanager
async def raw_server(handler: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[RawServer]:
    """Serve one request a connection with `handler`, and close the connection when it returns."""
    running: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        ends = (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError)
        with contextlib.suppress(*ends), contextlib.closing(writer):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            pairs = (line.partition(":") for line in head[1:] if line)
            request = Request(head[0], {name.lower(): value.strip() for name, _, value in pairs}, reader, writer)
            server.requests.append(request)
            await handler(request)

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    server = RawServer(listener.sockets[0].getsockname()[1])
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield server
    finally:
        listener.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def ok(body: bytes, *headers: str) -> bytes:
    """Return a plain answer with this body."""
    return answer("200 OK", body, *headers)


def answer(status: str, body: bytes = b"", *headers: str) -> bytes:
    """Return an answer with the correct length of its body."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + body


def in_turn(*answers: bytes) -> Handler:
    """Return a handler that reads each request completely and sends these answers in turn, repeating the last."""
    left = list(answers)

    async def handle(request: Request) -> None:
        if request.headers.get("expect") == "100-continue":
            await request.say(b"HTTP/1.1 100 Continue\r\n\r\n")
        await request.read_body()
        await request.say(left.pop(0) if len(left) > 1 else left[0])

    return handle
