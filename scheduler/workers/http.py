"""HTTP with one worker: no proxy, no redirect, no cookie, and errors that name the URL and what was received."""

import asyncio
import os
import ssl
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import orjson

from scheduler.workers.http_connection import AnswerCut, AnswerRefused, Body, HttpAnswer, HttpConnection
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

_KEEP_ALIVE_S = 2.0
"""How long an idle connection may be used again: less than the 5 s after which a worker's uvicorn closes it."""
_MAX_ANSWER_BYTES = 64 * 2**20
_EVENT_STREAM = "text/event-stream"
_SHOWN = 200


class WorkerHttp:
    """Owner of the connections to one worker. `on_idle_lost` is called when the worker closes one between requests."""

    def __init__(
        self, url: str, *, api_key: str = "", headers: Mapping[str, str] | None = None, connect_s: float = 5.0
    ) -> None:
        """`headers` are sent with every request. Raises ConfigError for a key that no header can carry."""
        self.url = url
        target = urlsplit(url)
        self._host, self._port = target.hostname or "", target.port or (443 if target.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if target.scheme == "https" else None
        self._connect_s = connect_s
        if not api_key.isprintable():
            raise ConfigError("the key for the workers has a character that is not printable, such as a line break")
        key = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._head = _lines({"Host": target.netloc, **(headers or {}), **key})
        self._idle: list[HttpConnection] = []  # the one idle for longest first
        self.on_idle_lost: Callable[[], None] = lambda: None

    async def get(self, path: str, timeout_s: float) -> bytes:
        """Return the body of a GET. Raises a PdserveError."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._whole("GET", path, b"", {})
        except TimeoutError:
            raise DeadlineExceeded(f"{self.url}{path} did not answer within {timeout_s:g} s") from None

    async def get_json(self, path: str, timeout_s: float) -> dict[str, Any]:
        """Return the JSON object of a GET. Raises a PdserveError: Incompatible if the answer is not a JSON object."""
        return self._object(path, await self.get(path, timeout_s))

    async def post_json(self, path: str, body: Body, headers: Mapping[str, str]) -> dict[str, Any]:
        """Return the JSON object that answers a POST. Raises a PdserveError."""
        return self._object(path, await self._whole("POST", path, body, headers))

    async def post_stream(
        self, path: str, body: Body, headers: Mapping[str, str], feed: Callable[[bytes], None]
    ) -> None:
        """Pass to `feed`, as it arrives, the event stream that answers a POST; cancelling aborts it on the worker.

        Raises a PdserveError, also if the connection breaks while the body is read, and what `feed` raises.
        """
        await self._request("POST", path, body, headers, HttpAnswer(feed, _EVENT_STREAM))

    async def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _whole(self, method: str, path: str, body: Body, headers: Mapping[str, str]) -> bytes:
        found = bytearray()

        def take(data: bytes) -> None:
            found.extend(data)
            if len(found) > _MAX_ANSWER_BYTES:
                raise InternalError(f"{self.url}{path} answered more than {_MAX_ANSWER_BYTES} bytes")

        await self._request(method, path, body, headers, HttpAnswer(take))
        return bytes(found)

    async def _request(
        self, method: str, path: str, body: Body, headers: Mapping[str, str], answer: HttpAnswer
    ) -> None:
        """Send a request and pass on its answer. Raises a PdserveError, also for an answer of the wrong type."""
        own = {"Content-Type": "application/json", "Content-Length": len(body), **headers} if body else headers
        request = f"{method} {path} HTTP/1.1\r\n".encode() + self._head + _lines(own) + b"\r\n"
        request, pieces = (request + body, ()) if isinstance(body, bytes) else (request, body)
        try:
            while True:
                idle = self._take_idle()
                connection = idle or await self._connect()
                try:
                    await connection.exchange(request, answer, pieces)
                    break
                except AnswerCut as cut:
                    if idle is None or method != "GET" or not cut.is_empty:
                        raise
                    # try again: the worker closed the idle connection while the request was in transit
            if connection.is_usable:
                self._idle.append(connection)
        except AnswerRefused:
            pass
        except OSError as error:
            raise InstanceLost(f"{self.url}{path}: {_why(error)}") from error
        if not answer.is_wanted:
            raise self._refusal(path, answer)

    def _take_idle(self) -> HttpConnection | None:
        """Return the connection that was idle for the shortest time, and close those that were idle for too long."""
        oldest = asyncio.get_running_loop().time() - _KEEP_ALIVE_S
        while self._idle and not (self._idle[0].is_usable and self._idle[0].used_at > oldest):
            self._idle.pop(0).close()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
        return None

    async def _connect(self) -> HttpConnection:
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: HttpConnection(lambda: self.on_idle_lost()), self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            raise ConnectionError(f"no connection within {self._connect_s:g} s") from None
        return connection

    def _refusal(self, path: str, answer: HttpAnswer) -> PdserveError:
        """Return the error for an answer of another status or type."""
        if answer.status != 200:
            return self._error(path, answer.status, bytes(answer.refused))
        return Incompatible(f"{self.url}{path} answered {answer.content_type}, not an event stream")

    def _error(self, path: str, status: int, body: bytes) -> PdserveError:
        """Return the error for an answer whose status is not 200."""
        text = _message(body)
        shown = f"{self.url}{path} answered {status}: {text}"
        match status:
            case 400 | 413 | 422 if path.startswith("/v1/"):
                return InvalidRequest(text)
            case 401 | 403:
                return Incompatible(f"{shown}; it needs a key: --worker-api-key-file")
            case 429:
                return NoCapacity(shown)
            case 502 | 503 | 504:
                return Unavailable(shown)
            case status if 300 <= status < 500:
                return Incompatible(shown)
        return InternalError(shown)

    def _object(self, path: str, body: bytes) -> dict[str, Any]:
        try:
            found = orjson.loads(body)
        except orjson.JSONDecodeError:
            found = None
        if not isinstance(found, dict):
            raise Incompatible(f"{self.url}{path} answered {_shown(body)!r}, not a JSON object: is it a vLLM server?")
        return found


def _why(error: OSError) -> str:
    """Return the system's text for an error, without the addresses that the loop adds."""
    # TLS and resolver errors have numbers of their own.
    is_errno = not isinstance(error, ssl.SSLError) and (error.errno or 0) > 0
    return os.strerror(error.errno or 0) if is_errno else str(error) or type(error).__name__


def _lines(headers: Mapping[str, object]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()


def _message(body: bytes) -> str:
    """Return the message of an OpenAI error body, else the start of the body."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return _shown(body)
    inner = found.get("error", found) if isinstance(found, dict) else found
    message = inner.get("message") if isinstance(inner, dict) else inner
    return message[:1000] if isinstance(message, str) else _shown(body)


def _shown(body: bytes) -> str:
    return body[:_SHOWN].decode(errors="replace")
