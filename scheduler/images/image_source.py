"""The bytes of an image: from a data URL, a server, or a file below the allowed folder."""

import asyncio
import binascii
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pydantic_core import CoreConfig, SchemaValidator, ValidationError
from pydantic_core.core_schema import bytes_schema

from remote_files.addresses import AddressRules
from remote_files.download import download_bytes
from remote_files.exchange import AllowedServers
from remote_files.limits import DownloadLimits, Retries, Waits
from wire.errors import InvalidRequest
from wire.prompt_images import MAX_IMAGE_BYTES

_DATA = re.compile(r"data:(?P<type>[^,;]{0,80})(;[^,;]{0,80}){0,4};base64,", re.IGNORECASE)
_PIECE_CHARS = 2**19  # a multiple of 4, below a millisecond: more at once would block the event loop

_FAST = SchemaValidator(bytes_schema(), CoreConfig(val_json_bytes="base64"))
"""Decodes base64 five times as fast as binascii, but also accepts URLs' alphabet and missing padding."""

Take = Callable[[int], None]
"""Counts bytes before they are held; raises if there are too many."""


@dataclass(frozen=True, slots=True)
class ImageSources:
    """Where images may come from: `hosts` (empty: any) at allowed addresses within `timeout_s`, and `folder`.

    One base64 text is decoded at a time; otherwise each turn of the event loop would decode a piece of every one.
    """

    rules: AddressRules
    hosts: tuple[str, ...] = ()
    folder: Path | None = None
    timeout_s: float = 10.0
    decoding: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def read(self, url: str, take: Take) -> bytes:
        """Return the file. Raises InvalidRequest, ConfigError, Unavailable, DeadlineExceeded, and `take`'s errors."""
        scheme = url[:5].lower()
        if scheme == "data:":
            head = _DATA.match(url)
            if head is None:
                raise InvalidRequest("a data URL of an image must begin with data:image/png;base64, or another type")
            return await self.decode(url, take, "the data URL", start=head.end())
        if scheme == "file:":
            return await asyncio.to_thread(_read_file, url, self.folder, take)
        limits = DownloadLimits(
            max_bytes=MAX_IMAGE_BYTES,
            whole_s=self.timeout_s,
            waits=Waits(connect_s=self.timeout_s, idle_s=self.timeout_s),
            retries=Retries(tries=3),
        )
        return await download_bytes(url, AllowedServers(self.rules, hosts=self.hosts), limits, take)

    async def decode(self, text: str, take: Take, name: str, start: int = 0) -> bytes:
        """Return the bytes of base64 text from `start` on, decoded piece by piece. Raises as `read` does."""
        async with self.decoding:
            take((len(text) - start) // 4 * 3)
            pieces: list[bytes] = []
            for at in range(start, len(text), _PIECE_CHARS):
                piece = text[at : at + _PIECE_CHARS]
                if at + _PIECE_CHARS < len(text) and "=" in piece:
                    raise InvalidRequest(f"{name} is not valid base64: there is padding before its end")
                try:
                    pieces.append(decode_base64(piece))
                except ValueError as error:
                    raise InvalidRequest(f"{name} is not valid base64: {error}") from None
                await asyncio.sleep(0)
            return b"".join(pieces)


def decode_base64(text: str) -> bytes:
    """Return the bytes that base64 text, with all its padding, encodes. Raises ValueError."""
    if len(text) % 4 == 0 and "-" not in text and "_" not in text:
        try:
            decoded: bytes = _FAST.validate_python(text)
        except ValidationError:
            pass  # binascii accepts bits after the last byte of this text, or reports what is wrong
        else:
            return decoded
    return binascii.a2b_base64(text.encode(), strict_mode=True)


def _read_file(url: str, folder: Path | None, take: Take) -> bytes:
    """Return a regular file below `folder`; links that lead out of it are not followed."""
    if folder is None:
        raise InvalidRequest("file: URLs need --allowed-local-media-path, which this server does not set")
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise InvalidRequest("a file: URL has a path and nothing else: file:///folder/image.png")
    try:
        path, root = Path(unquote(parts.path)).resolve(strict=True), folder.resolve(strict=True)
        if not path.is_relative_to(root):
            raise FileNotFoundError
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError, RuntimeError):
        raise InvalidRequest("no such file below --allowed-local-media-path") from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise InvalidRequest("no such file below --allowed-local-media-path")
    with os.fdopen(descriptor, "rb") as file:
        if found.st_size > MAX_IMAGE_BYTES:
            raise InvalidRequest(f"the file has {found.st_size} bytes, but the limit is {MAX_IMAGE_BYTES}")
        take(found.st_size)
        return file.read(found.st_size)
