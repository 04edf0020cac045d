"""Send a file to a URL: one PUT of the whole file, repeated with the same bytes if its result is unknown."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO

from aiohttp.abc import AbstractResolver

from remote_files.addresses import AddressRules
from remote_files.answers import REDIRECTS, failure
from remote_files.digests import content_md5, in_header, stored_md5
from remote_files.download import Progress
from remote_files.exchange import AllowedServers
from remote_files.exchange_deadline import ExchangeDeadline
from remote_files.limits import UploadLimits
from remote_files.retries import Transient, retried
from remote_files.url import RemoteUrl
from wire.errors import ConfigError

_DEFAULT_LIMITS = UploadLimits()
_PIECE_BYTES = 1 << 16
_GO_AHEAD = "go-ahead for the body"


async def upload(
    path: Path,
    url: str,
    *,
    rules: AddressRules,
    limits: UploadLimits = _DEFAULT_LIMITS,
    on_bytes: Progress | None = None,
    resolver: AbstractResolver | None = None,
) -> int:
    """PUT the file at `path` to `url` with its length, and its Content-MD5 if the URL allows one; return its size.

    If the URL allows none, the MD5 in the store's answer is compared. The file is not removed.
    Raises ConfigError for a URL or an address that is not allowed, for an answer that a retry would not change (with
    the server's message), and for a file that cannot be read or changes; Unavailable when all tries failed;
    DeadlineExceeded after `limits.whole_s`.
    """
    target = RemoteUrl.parse(url)
    try:
        md5 = await asyncio.to_thread(content_md5, path)
        with path.open("rb") as file:
            sending = _Sending(file, md5, AllowedServers(rules, resolver), limits, on_bytes)
            return await retried(
                partial(sending.attempt, target), what=str(target), retries=limits.retries, whole_s=limits.whole_s
            )
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error


class _Sending:
    """One upload's tries."""

    def __init__(
        self, file: BinaryIO, md5: bytes, servers: AllowedServers, limits: UploadLimits, on_bytes: Progress | None
    ) -> None:  # fmt: skip
        self._file = file
        self._size, self._changed_at = self._state()
        self._md5 = md5
        self._servers = servers
        self._limits = limits
        self._on_bytes = on_bytes
        self._expects_continue = self._size >= limits.expect_from_bytes
        self._sent = 0

    async def attempt(self, target: RemoteUrl) -> int:
        """Send the whole file once; if the server does not answer the Expect header, the body is sent anyway."""
        deadline = ExchangeDeadline(f"connection to {target.host}:{target.port}", self._limits.waits.connect_s)
        try:
            return await self._put(target, deadline)
        except Transient:
            if deadline.expected != _GO_AHEAD:
                raise
        self._expects_continue = False
        return await self.attempt(target)

    async def _put(self, target: RemoteUrl, deadline: ExchangeDeadline) -> int:
        if self._state() != (self._size, self._changed_at):
            raise ConfigError(f"{self._file.name}: the file changed while it was sent: it had {self._size} bytes")
        self._sent = 0
        async with self._servers.exchange(
            "PUT", target, deadline, partial(self._on_connected, deadline),
            headers=self._headers(target), body=self._body_pieces(deadline), expect100=self._expects_continue,
        ) as response:  # fmt: skip
            if self._expects_continue and response.status == 417:
                raise Transient("the server does not support Expect: 100-continue")
            deadline.expect("end of the answer", self._limits.waits.idle_s)
            if response.status in REDIRECTS:
                why = "redirects of a PUT are not followed"
                raise ConfigError(f"{target}: the server answered {response.status}, and {why}")
            if not 200 <= response.status < 300:
                raise await failure(response, target, deadline)
            if self._sent < self._size:
                raise Transient(f"the server answered {response.status} after {self._sent} of {self._size} bytes")
            self._check_stored(response.headers, target)
        return self._size

    def _headers(self, target: RemoteUrl) -> dict[str, str]:
        md5 = {"Content-MD5": in_header(self._md5)} if target.accepts_headers else {}
        return {**md5, "Content-Length": str(self._size)}

    def _check_stored(self, headers: Mapping[str, str], target: RemoteUrl) -> None:
        """Raise Transient if the stored file differs; a store that received the MD5 has compared it itself."""
        stored = None if target.accepts_headers else stored_md5(headers)
        if stored not in (None, self._md5):
            raise Transient(f"the stored file has MD5 {stored.hex()}, but the local file has {self._md5.hex()}")

    def _on_connected(self, deadline: ExchangeDeadline) -> None:
        if self._expects_continue:
            deadline.expect(_GO_AHEAD, self._limits.expect_s)
        else:
            deadline.expect("answer", self._limits.waits.idle_s)

    def _state(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    async def _body_pieces(self, deadline: ExchangeDeadline) -> AsyncIterator[bytes]:
        """Yield the file; the connection takes the next piece after it has sent the previous one."""
        while piece := os.pread(self._file.fileno(), min(_PIECE_BYTES, self._size - self._sent), self._sent):
            deadline.expect(f"acceptance of the next {len(piece)} bytes", self._limits.waits.idle_s)
            self._sent += len(piece)  # before the yield: an answer may arrive before the next piece is taken
            yield piece
            if self._on_bytes is not None:
                self._on_bytes(self._sent, self._size)
        deadline.expect("answer", self._limits.waits.idle_s)
