"""Map a server's answer to a transfer's error, with the safe part of its message."""

import re

import aiohttp

from remote_files.exchange_deadline import ExchangeDeadline
from remote_files.redaction import redacted_text
from remote_files.retries import Transient
from remote_files.retry_after import retry_after_s
from remote_files.url import RemoteUrl
from wire.errors import ConfigError

REDIRECTS = frozenset({301, 302, 303, 307, 308})
_TRANSIENT = frozenset({408, 425, 429})
_PERMANENT = frozenset({501, 505})
_MAX_BYTES = 4096
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")


async def failure(response: aiohttp.ClientResponse, url: RemoteUrl, deadline: ExchangeDeadline) -> Exception:
    """Return the error for an unsuccessful answer: Transient, or ConfigError if a retry would fail too."""
    detail = await _error_detail(response, url, deadline)
    status = f"{response.status} {redacted_text(response.reason or '', str(url.url))}".strip()
    message = f"the server answered {status}{': ' if detail else ''}{detail}"
    if response.status in _TRANSIENT or (response.status >= 500 and response.status not in _PERMANENT):
        return Transient(message, retry_after_s(response.headers.get("Retry-After", "")))
    end = url.expires_at
    until = f" (this presigned URL is valid until {end:%Y-%m-%d %H:%M:%S} UTC)" if end else ""
    return ConfigError(f"{url}: {message}{until}")


async def _error_detail(response: aiohttp.ClientResponse, url: RemoteUrl, deadline: ExchangeDeadline) -> str:
    """Return the start of the body as one line without secrets; for an S3 error, its code and message."""
    body = bytearray()
    try:
        while len(body) < _MAX_BYTES and (piece := await response.content.readany()):
            body += piece
    except aiohttp.ClientError:
        pass  # The received part is enough.
    text = bytes(body[:_MAX_BYTES]).decode(errors="replace")
    if "Content-Encoding" in response.headers:
        return ""
    parts = [found[1] for pattern in (_CODE, _MESSAGE) if (found := pattern.search(text))]
    return redacted_text(": ".join(parts) or text, str(url.url))
