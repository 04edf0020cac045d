"""Fetch a remote file to disk: as a stream, within limits, whole or not at all."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import aiohttp
from aiohttp.abc import AbstractResolver

from batch.remote.addresses import AddressRules
from batch.remote.answers import REDIRECTS, failure
from batch.remote.digests import Digests
from batch.remote.exchange import Peers
from batch.remote.limits import DownloadLimits
from batch.remote.patience import Patience
from batch.remote.received_file import ReceivedFile
from batch.remote.retries import Transient, retried
from batch.remote.url import RemoteUrl
from wire.errors import ConfigError

Progress = Callable[[int, int | None], None]
"""Told the bytes that went over and, where it is known, how many there are; a new try counts from 0 again."""
_DEFAULT_LIMITS = DownloadLimits()
# Some stores keep the last one of an upload, whose framing they took off.
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
    """Write the file behind `url` to `to`, which appears when it is whole; return its bytes.

    Raises ConfigError for a URL or an address that is not allowed, a file that is not there (4xx) or above the
    limits, and a disk that refuses; Unavailable when all tries failed; DeadlineExceeded after `limits.whole_s`.
    """
    source = RemoteUrl.parse(url)
    fetch = _Fetch(Peers(rules, resolver), limits, on_bytes)
    return await retried(
        partial(fetch.attempt, source, to), what=str(source), retries=limits.retries, whole_s=limits.whole_s
    )


class _Fetch:
    """One download's tries."""

    def __init__(self, peers: Peers, limits: DownloadLimits, on_bytes: Progress | None) -> None:
        self._peers = peers
        self._limits = limits
        self._on_bytes = on_bytes

    async def attempt(self, source: RemoteUrl, to: Path) -> int:
        """Follow redirects to the file and receive it; each hop is a new connection to an address checked anew."""
        url = source
        for _ in range(self._limits.max_redirects + 1):
            patience = Patience(f"connection to {url.host}:{url.port}", self._limits.waits.connect_s)
            connected = partial(patience.expect, "answer", self._limits.waits.idle_s)
            async with self._peers.exchange("GET", url, patience, connected) as response:
                if response.status not in REDIRECTS:
                    return await self._receive(response, url, to, patience)
                url = _redirected(response, url)
        raise ConfigError(f"{source}: more than {self._limits.max_redirects} redirects")

    async def _receive(self, response: aiohttp.ClientResponse, url: RemoteUrl, to: Path, patience: Patience) -> int:
        waits = self._limits.waits
        patience.expect("next bytes of the answer", waits.idle_s)
        if response.status != 200:
            raise await failure(response, url, patience)
        length = _acceptable_length(response, url, self._limits.max_bytes)
        digests = Digests(response.headers)
        received = 0
        window_end = waits.window_bytes
        with ReceivedFile(to) as file:
            while piece := await response.content.readany():
                received += len(piece)
                if received > self._limits.max_bytes:
                    raise ConfigError(f"{url}: the file is above the limit of {self._limits.max_bytes} bytes")
                file.write(piece)
                digests.update(piece)
                if received >= window_end:
                    window_end = received + waits.window_bytes
                    patience.expect(f"{waits.window_bytes} bytes more", waits.idle_s)
                if self._on_bytes is not None:
                    self._on_bytes(received, length)
            if length is not None and received != length:
                raise Transient(f"{received} of {length} bytes came")
            digests.check()
            file.keep()
        return received


def _redirected(response: aiohttp.ClientResponse, url: RemoteUrl) -> RemoteUrl:
    if url.is_presigned:
        raise ConfigError(
            f"{url}: the server answered {response.status}, and a presigned URL is not followed elsewhere; "
            "is it signed for the bucket's own region?"
        )
    return url.target(response.headers.get("Location", ""))


def _acceptable_length(response: aiohttp.ClientResponse, url: RemoteUrl, max_bytes: int) -> int | None:
    """Return the length that is told, if one is; raise ConfigError where the body is not the file as it is."""
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in _PLAIN:
        raise ConfigError(f"{url}: the file is stored with Content-Encoding {encoding!r:.40}; store it as plain text")
    length = response.content_length
    if length is not None and length > max_bytes:
        raise ConfigError(f"{url}: {length} bytes are above the limit of {max_bytes}")
    return length
