"""Send requests to a live server over HTTP, on a bounded number of connections."""

import asyncio
import io
import ssl
from collections.abc import Mapping
from typing import Self
from urllib.parse import urlsplit

import aiohttp

from batch.backend import NO_HEADERS, Answer
from remote_files.os_errors import system_message
from wire.errors import ConfigError, Unavailable

_PIECE_BYTES = 2**18


class UrlBackend:
    """A BatchBackend over `base_url`; open it with `async with`. Proxy variables are ignored, redirects not followed.

    The key is sent in a header and shown nowhere: errors and repr have only host and port. A `/v1` at the end of the
    URL is dropped, since lines have the whole path.
    """

    def __init__(
        self, base_url: str, api_key: str | None = None, *, connections: int = 256, timeout_s: float = 3600.0,
        connect_timeout_s: float = 10.0, max_answer_bytes: int = 2**28,
    ) -> None:  # fmt: skip
        """`timeout_s`: for one answer, from the request to its last byte. Raises ConfigError."""
        self._base, self.shown = _parse(base_url)
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {_checked_key(api_key)}"}
        self._connections = connections
        self._max_answer_bytes = max_answer_bytes
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=connect_timeout_s)
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        """Return the server's host and port, without key and path."""
        return f"UrlBackend({self.shown})"

    async def __aenter__(self) -> Self:
        """Open the connection pool, which connects as needed."""
        trusted = ssl.create_default_context() if self.shown.startswith("https:") else True
        connector = aiohttp.TCPConnector(limit=self._connections, limit_per_host=self._connections, ssl=trusted)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=self._timeout, trust_env=False, cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
        )  # fmt: skip
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections."""
        assert self._session is not None
        session, self._session = self._session, None
        await session.close()

    async def send(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = NO_HEADERS
    ) -> Answer:  # fmt: skip
        """Return the server's answer. Raises Unavailable if it is not complete in time and within the size limit."""
        assert self._session is not None, "not opened"
        own = {"Content-Type": "application/json"} if body else {}
        try:
            async with self._session.request(
                method, self._base + path, data=_payload(body), headers={**own, **headers}, allow_redirects=False
            ) as response:
                content = await self._read(response)
                return Answer(response.status, {k.lower(): v for k, v in response.headers.items()}, content)
        except aiohttp.ConnectionTimeoutError:
            raise Unavailable(f"{self.shown}: no connection within {self._timeout.sock_connect:g} s") from None
        except TimeoutError:
            raise Unavailable(f"{self.shown} gave no complete answer within {self._timeout.total:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"{self.shown}: {_reason(error)}") from None  # its text may contain the whole URL

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        content = bytearray()
        async for piece in response.content.iter_chunked(_PIECE_BYTES):
            content += piece
            if len(content) > self._max_answer_bytes:
                raise Unavailable(f"{self.shown} answers with more than {self._max_answer_bytes} bytes")
        return bytes(content)


def _payload(body: bytes) -> bytes | io.BytesIO | None:
    """Return a large body as a stream, so that other requests can be sent between its pieces."""
    return io.BytesIO(body) if len(body) > _PIECE_BYTES else body or None


def _reason(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "its certificate is not trusted by this machine"
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return "no TLS connection: does the server use https://?"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection: {system_message(error.os_error)}"
    if isinstance(error, aiohttp.ServerDisconnectedError | asyncio.IncompleteReadError | aiohttp.ClientPayloadError):
        return "the connection was lost"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"no HTTP answer was received ({type(error).__name__})"


def _parse(base_url: str) -> tuple[str, str]:
    """Return the prefix of all paths, and the form for messages. Raises ConfigError, which never quotes the URL."""
    try:
        parts = urlsplit(base_url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ConfigError("the base URL has an invalid host or port: use http://HOST:PORT") from None
    if parts.scheme not in ("http", "https"):
        raise ConfigError("the base URL does not begin with http:// or https://: use http://HOST:PORT")
    if not host:
        raise ConfigError("the base URL has no host: use http://HOST:PORT")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError("the base URL has a user, a query or a fragment: remove them; pass a key with --api-key")
    named = f"[{host}]" if ":" in host else host
    shown = f"{parts.scheme}://{named}" + (f":{port}" if port is not None else "")
    return shown + parts.path.rstrip("/").removesuffix("/v1").rstrip("/"), shown


def _checked_key(api_key: str) -> str:
    if not api_key or not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise ConfigError("the API key is empty or has characters that are invalid in a header")
    return api_key
