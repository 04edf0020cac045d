"""HTTP with one worker: no proxy, no redirect, no cookie, and errors that name the URL and what came."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from wire.errors import (
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
"""An idle connection is used again for this long: less than uvicorn's 5 s, after which the worker closes it."""
_MAX_ERROR_BYTES = 4096
_MAX_ANSWER_BYTES = 64 * 2**20
_SHOWN = 200


class WorkerHttp:
    """Owner of the connections to one worker."""

    def __init__(
        self, url: str, *, api_key: str = "", headers: Mapping[str, str] | None = None, connect_s: float = 5.0
    ) -> None:
        """`headers` are sent with every request."""
        self.url = url
        key = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Content-Type": "application/json", **(headers or {}), **key},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
            trust_env=False,
        )

    async def get(self, path: str, timeout_s: float) -> bytes:
        """Return the body of a GET. Raises a PdserveError."""
        try:
            async with asyncio.timeout(timeout_s):
                async with self._answered("GET", path, None, {}) as response:
                    return await _whole(response)
        except TimeoutError:
            raise DeadlineExceeded(f"{self.url}{path} did not answer within {timeout_s:g} s") from None

    async def get_json(self, path: str, timeout_s: float) -> dict[str, Any]:
        """Return the JSON object of a GET. Raises a PdserveError, Incompatible if it is something else."""
        return self._object(path, await self.get(path, timeout_s))

    async def post_json(self, path: str, body: bytes, headers: Mapping[str, str]) -> dict[str, Any]:
        """Return the JSON object that answers a POST. Raises a PdserveError."""
        async with self._answered("POST", path, body, headers) as response:
            return self._object(path, await _whole(response))

    @asynccontextmanager
    async def post_stream(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.StreamReader]:
        """Yield the body that answers a POST as it arrives; leaving early closes the connection, which aborts it there.

        Raises a PdserveError, also for what breaks while the body is read.
        """
        async with self._answered("POST", path, body, headers) as response:
            if response.content_type != "text/event-stream":
                raise self._unexpected(path, response, "an event stream")
            yield response.content

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    @asynccontextmanager
    async def _answered(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._session.request(
                method, self.url + path, data=body, headers=headers, allow_redirects=False
            ) as response:
                if response.status != 200:
                    raise self._error(path, response, await response.content.read(_MAX_ERROR_BYTES))
                yield response
        except (aiohttp.ClientError, ConnectionError) as error:
            raise InstanceLost(f"{self.url}{path}: {_why(error)}") from error

    def _error(self, path: str, response: aiohttp.ClientResponse, body: bytes) -> PdserveError:
        """Return the error of an answer that is not 200."""
        text = _message(body)
        shown = f"{self.url}{path} answered {response.status}: {text}"
        match response.status:
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

    def _unexpected(self, path: str, response: aiohttp.ClientResponse, wanted: str) -> Incompatible:
        return Incompatible(f"{self.url}{path} answered {response.content_type}, not {wanted}")

    def _object(self, path: str, body: bytes) -> dict[str, Any]:
        try:
            found = orjson.loads(body)
        except orjson.JSONDecodeError:
            found = None
        if not isinstance(found, dict):
            raise Incompatible(f"{self.url}{path} answered {_shown(body)!r}, not a JSON object: is it a vLLM server?")
        return found


def _why(error: aiohttp.ClientError | ConnectionError) -> str:
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number) if number else str(error) or type(error).__name__


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > _MAX_ANSWER_BYTES:
            raise InternalError(f"{response.url} answered more than {_MAX_ANSWER_BYTES} bytes")
    return bytes(body)


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
