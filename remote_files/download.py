"""Fetch a remote file to disk or into memory: as a stream, within limits, whole or not at all."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import aiohttp
from aiohttp.abc import AbstractResolver

from remote_files.addresses import AddressRules
from remote_files.answers import REDIRECTS, failure
from remote_files.exchange import AllowedServers
from remote_files.exchange_deadline import ExchangeDeadline
from remote_files.limits import DownloadLimits
from remote_files.part import FilePart
from remote_files.received_bytes import ReceivedBytes
from remote_files.received_file import ReceivedFile
from remote_files.retries import Transient, retried
from remote_files.url import RemoteUrl
from wire.errors import ConfigError

Progress = Callable[[int, int | None], None]
"""Called with the bytes transferred and the total, if known; a try from the start counts from 0 again."""
_DEFAULT_LIMITS = DownloadLimits()
# Some stores keep aws-chunked from the upload, although they removed its framing.
_PLAIN = ("", "identity", "aws-chunked")


async def download(
    url: str,
    to: Path,
    *,
    rules: AddressRules,
    limits: DownloadLimits = _DEFAULT_LIMITS,
    on_bytes: Progress | None = None,
    resolver: AbstractResolver | None = None,
) -> int:
    """Write the file at `url` to `to`, which appears when it is complete; return its size in bytes.

    Raises ConfigError for a URL or an address that is not allowed, a file that is missing (4xx) or above the
    limits, and a write error; Unavailable when all tries failed; DeadlineExceeded after `limits.whole_s`.
    """
    source = RemoteUrl.parse(url)
    with ReceivedFile(to) as file:
        return await _Fetch(AllowedServers(rules, resolver), file, limits, on_bytes).run(source)


async def download_bytes(
    url: str, servers: AllowedServers, limits: DownloadLimits, before_each: Callable[[int], None]
) -> bytes:
    """Return the file at `url`. Raises as `download` does.

    `before_each` is called with the size of each piece before it is stored; an error that it raises ends the download.
    """
    received = ReceivedBytes(before_each)
    await _Fetch(servers, received, limits, None).run(RemoteUrl.parse(url))
    return received.content


class _Received(Protocol):
    """Where the bytes of a download go."""

    def restart(self) -> None:
        """Drop everything received so far."""
        ...

    def write(self, piece: bytes) -> None:
        """Append these bytes."""
        ...

    def keep(self) -> None:
        """Keep the file: it is complete."""
        ...


class _Fetch:
    """One download's tries; the next try resumes an interrupted one if the server supports that."""

    def __init__(
        self, servers: AllowedServers, file: _Received, limits: DownloadLimits, on_bytes: Progress | None
    ) -> None:
        self._servers = servers
        self._file = file
        self._limits = limits
        self._on_bytes = on_bytes
        self._part: FilePart | None = None

    async def run(self, source: RemoteUrl) -> int:
        """Return the file's size in bytes; try as often as the limits allow."""
        attempt = partial(self._attempt, source)
        return await retried(attempt, what=str(source), retries=self._limits.retries, whole_s=self._limits.whole_s)

    async def _attempt(self, source: RemoteUrl) -> int:
        """Follow redirects to the file and receive it; each hop is a new connection to a newly checked address."""
        url = source
        headers = {} if self._part is None else self._part.headers
        for _ in range(self._limits.max_redirects + 1):
            deadline = ExchangeDeadline(f"connection to {url.host}:{url.port}", self._limits.waits.connect_s)
            connected = partial(deadline.expect, "answer", self._limits.waits.idle_s)
            async with self._servers.exchange("GET", url, deadline, connected, headers=headers) as response:
                if response.status not in REDIRECTS:
                    return await self._receive(response, url, deadline)
                url = _follow_redirect(response, url)
        raise ConfigError(f"{source}: more than {self._limits.max_redirects} redirects")

    async def _receive(self, response: aiohttp.ClientResponse, url: RemoteUrl, deadline: ExchangeDeadline) -> int:
        waits, maximum = self._limits.waits, self._limits.max_bytes
        deadline.expect("more bytes of the answer", waits.idle_s)
        part = await self._part_of(response, url, deadline)
        window_end = part.num_bytes + waits.window_bytes
        while piece := await response.content.readany():
            if part.num_bytes + len(piece) > maximum:
                raise ConfigError(f"{url}: the file is above the limit of {maximum} bytes")
            self._file.write(piece)
            part.digests.update(piece)
            part.num_bytes += len(piece)
            if part.num_bytes >= window_end:
                window_end = part.num_bytes + waits.window_bytes
                deadline.expect(f"further {waits.window_bytes} bytes", waits.idle_s)
            if self._on_bytes is not None:
                self._on_bytes(part.num_bytes, part.length)
        if part.length is not None and part.num_bytes != part.length:
            raise Transient(f"only {part.num_bytes} of {part.length} bytes were received")
        self._part = None  # a file that fails the check is not resumed
        part.digests.check()
        self._file.keep()
        return part.num_bytes

    async def _part_of(self, response: aiohttp.ClientResponse, url: RemoteUrl, deadline: ExchangeDeadline) -> FilePart:
        """Return the partial file that this response starts or resumes. Raises the error of any other response."""
        begun, self._part = self._part, None
        if response.status == 206 and begun is not None and begun.headers:
            if _acceptable_length(response, url, self._limits.max_bytes) is None or not begun.is_continued(
                response.headers
            ):
                raise Transient("the server's answer is not the rest of the file")
            self._part = begun
        elif response.status == 200:
            length = _acceptable_length(response, url, self._limits.max_bytes)
            self._file.restart()
            self._part = FilePart.begun(response.headers, length)
        elif response.status == 416 and begun is not None:
            raise Transient("the file has changed since the last try")
        else:
            self._part = begun
            raise await failure(response, url, deadline)
        return self._part


def _follow_redirect(response: aiohttp.ClientResponse, url: RemoteUrl) -> RemoteUrl:
    if url.is_presigned:
        raise ConfigError(
            f"{url}: the server answered {response.status}, and redirects of a presigned URL are not followed; "
            "is it signed for the bucket's own region?"
        )
    return url.target(response.headers.get("Location", ""))


def _acceptable_length(response: aiohttp.ClientResponse, url: RemoteUrl, max_bytes: int) -> int | None:
    """Return the answer's length, if it has one. Raises ConfigError if the body is encoded or too long."""
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in _PLAIN:
        raise ConfigError(f"{url}: the file is stored with Content-Encoding {encoding!r:.40}; store it without one")
    length = response.content_length
    if length is not None and length > max_bytes:
        raise ConfigError(f"{url}: {length} bytes are above the limit of {max_bytes}")
    return length
