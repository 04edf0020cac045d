"""Forwards requests to schedulers. When a scheduler dies, its streams go on through another scheduler.

client --POST--> proxy --POST, X-Pdserve-Keep-Stream: if-possible--> scheduler --events 1, 2, ... --dies
                  |----GET /v1/streams/ID?after=2--> another scheduler --events 3, 4, ...--> client
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import aiohttp
import orjson
from starlette.types import Message, Receive, Scope, Send

from scheduler.api.resumed import NO_EVENTS
from scheduler.api.sse import ClientGone, until_disconnect
from scheduler.http.drain import Drain
from telemetry.logs import EventLogger
from wire.errors import Draining

_log = EventLogger("proxy")
_KEEP = "x-pdserve-keep-stream"
_STREAM = "x-pdserve-stream"
_PER_CONNECTION = frozenset((
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
    "upgrade", "host", "content-length", "expect", "date",
))  # fmt: skip
_CONNECT_S = 5.0
_BODY_S = 30.0
_ANSWER_S = 600.0
"""How long a server may send nothing: its own limits end requests earlier."""
_RETRY_S = 0.1
_END_S = 5.0
_BROKEN = (aiohttp.ClientError, ConnectionError, TimeoutError)


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    """How long a request may wait for a server, how long a stream may be silent, and how large a body may be."""

    wait_s: float
    silence_s: float
    max_body_bytes: int


@dataclass(slots=True)
class _Exchange:
    """One request and how much of its answer the client has: whole events of a stream, else bytes."""

    scope: Scope
    send: Send
    body: bytes
    started: bool = False
    stream_id: str = ""
    num_events: int = 0
    unsent: bytes = b""
    headers: list[tuple[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        given = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in self.scope["headers"]]
        self.headers = [(name, value) for name, value in given if name not in _PER_CONNECTION]
        if self.scope["method"] == "POST" and not any(name == _KEEP for name, _ in given):
            self.headers.append((_KEEP, "if-possible"))

    @property
    def target(self) -> tuple[str, str, bytes | None]:
        """The method, path and body of the next request to a server."""
        if self.stream_id:
            return "GET", f"/v1/streams/{self.stream_id}?after={self.num_events}", None
        query = self.scope["query_string"].decode("latin-1")
        path = self.scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
        return self.scope["method"], path, self.body or None

    async def start(self, answer: aiohttp.ClientResponse) -> None:
        """Start the client's answer."""
        self.started, self.stream_id = True, answer.headers.get(_STREAM, "")
        kept = [(n, v) for n, v in answer.raw_headers if n.decode("latin-1").lower() not in _PER_CONNECTION]
        headers = [(name.lower(), value) for name, value in kept]
        if "content-length" in answer.headers and not self.stream_id:
            headers.append((b"content-length", answer.headers["content-length"].encode()))
        await self.send({"type": "http.response.start", "status": answer.status, "headers": headers})

    async def write(self, part: bytes) -> None:
        """Pass a part of the answer on; of a kept stream only whole events, after which another server can go on."""
        if self.stream_id:
            whole, mark, self.unsent = (self.unsent + part).rpartition(b"\n\n")
            part = whole + mark
            self.num_events += sum(not one.startswith(NO_EVENTS) for one in part.split(b"\n\n")[:-1])
        if part:
            await self.send({"type": "http.response.body", "body": part, "more_body": True})

    async def end(self, last: bytes = b"") -> None:
        """End the answer."""
        await self.send({"type": "http.response.body", "body": last, "more_body": False})


class StreamProxy:
    """An ASGI app. Owns nothing but the open connections; use it in an `async with`."""

    def __init__(self, servers: Sequence[str], limits: ProxyLimits, drain: Drain) -> None:
        self._servers, self._limits, self._drain = tuple(servers), limits, drain
        self._next = itertools.count()

    async def __aenter__(self) -> Self:
        """Open the client."""
        self._client = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_ANSWER_S),
            connector=aiohttp.TCPConnector(limit=0), auto_decompress=False, trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )  # fmt: skip
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self._client.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        try:
            async with asyncio.timeout(_BODY_S):
                body = await self._read(receive)
        except TimeoutError:
            await _refuse(send, 408, f"the body took longer than {_BODY_S:g} s to arrive")
            return
        except ClientGone:
            return
        if body is None:
            await _refuse(send, 413, f"the body is larger than {self._limits.max_body_bytes} bytes (--max-body-bytes)")
            return
        exchange = _Exchange(scope, send, body)
        try:
            with self._drain:
                await until_disconnect(receive, self._answer(exchange))
        except Draining as error:
            await _refuse(send, 503, str(error))
        except ClientGone:
            if exchange.stream_id:
                await self._end(exchange)

    async def _read(self, receive: Receive) -> bytes | None:
        """Return the whole body, so that it can be sent again; None if it is too large. Raises ClientGone."""
        body, more = bytearray(), True
        while more:
            message: Message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("the client disconnected")
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._limits.max_body_bytes:
                return None
        return bytes(body)

    async def _answer(self, exchange: _Exchange) -> None:
        """Send the request until an answer is complete, at most `wait_s` after the last progress."""
        clock = asyncio.get_running_loop().time
        deadline, num_before = clock() + self._limits.wait_s, -1
        while True:
            server = self._servers[next(self._next) % len(self._servers)]
            why = "no server has answered"
            try:
                async with self._open(server, exchange) as answer:
                    if await self._forward(exchange, answer):
                        return
                    why = f"{server} answered {answer.status}"
            except _BROKEN as error:
                why = f"{server}: {error or type(error).__name__}"
            if exchange.num_events > num_before:
                deadline, num_before = clock() + self._limits.wait_s, exchange.num_events
            _log.warning("answer_broken", server=server, why=why, events=exchange.num_events)
            if exchange.started and not exchange.stream_id:
                raise ConnectionError(why)  # the client sees an incomplete answer
            if clock() >= deadline:
                await _give_up(exchange, why)
                return
            await asyncio.sleep(_RETRY_S)

    def _open(self, server: str, exchange: _Exchange) -> "aiohttp.client._RequestContextManager":
        method, path, body = exchange.target
        exchange.unsent = b""
        return self._client.request(method, server + path, data=body, headers=exchange.headers, allow_redirects=False)

    async def _forward(self, exchange: _Exchange, answer: aiohttp.ClientResponse) -> bool:
        """Pass an answer on; return False for one that only means that the server cannot go on with a stream now."""
        if not exchange.started:
            await exchange.start(answer)
        elif answer.status == 503:
            return False
        elif answer.status != 200:
            await exchange.end(_event(_error_in(answer.status, await answer.read())))
            return True
        async for part in self._parts(exchange, answer):
            await exchange.write(part)
        await exchange.end(exchange.unsent)
        return True

    async def _parts(self, exchange: _Exchange, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        while True:
            async with asyncio.timeout(self._limits.silence_s if exchange.stream_id else None):
                part = await answer.content.readany()
            if not part:
                return
            yield part

    async def _end(self, exchange: _Exchange) -> None:
        """End a stream whose client has left."""
        with contextlib.suppress(*_BROKEN):
            async with asyncio.timeout(_END_S):
                server = self._servers[next(self._next) % len(self._servers)]
                path = f"{server}/v1/streams/{exchange.stream_id}"
                async with self._client.delete(path, headers=exchange.headers):
                    return


async def _give_up(exchange: _Exchange, why: str) -> None:
    if exchange.started:
        await exchange.end(_event(_error(503, f"no server can go on with this stream: {why}")))
    else:
        await _refuse(exchange.send, 503, f"no server can be reached: {why}")


def _event(shown: object) -> bytes:
    return b"data: " + orjson.dumps(shown) + b"\n\n"


def _error_in(status: int, body: bytes) -> object:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return _error(status, "the server cannot go on with this stream")


def _error(status: int, message: str) -> dict[str, object]:
    return {"error": {"message": message, "type": "service_unavailable_error", "param": None, "code": status}}


async def _refuse(send: Send, status: int, message: str) -> None:
    content = orjson.dumps(_error(status, message))
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content, "more_body": False})
