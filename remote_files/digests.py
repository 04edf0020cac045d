"""The checksums that a server sends with a file, that an upload sends, and that a store returns for an upload."""

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from remote_files.limits import MIB
from remote_files.retries import Transient

_DIGEST = re.compile(r"\bsha-256=:([A-Za-z0-9+/=]+):")
_GOOGLE = re.compile(r"\bmd5=([A-Za-z0-9+/=]+)")
_MD5_ETAG = re.compile(r'"?([0-9a-fA-F]{32})"?')
_STORES = ("x-amz-request-id", "x-obs-request-id", "x-oss-request-id", "x-cos-request-id")
"""Headers of stores whose ETag is the MD5 of a file uploaded by one PUT, unless they encrypt it with a key service."""


class Digests:
    """Checks one file against the MD5 and SHA-256 of the whole file in the answer's headers, if present.

    An ETag is not used: its content is up to the server.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        header_digests = [
            ("md5", headers.get("Content-MD5")),
            ("md5", _first(_GOOGLE, _all(headers, "x-goog-hash"))),
            ("sha256", headers.get("x-amz-checksum-sha256")),
            ("sha256", _first(_DIGEST, headers.get("Repr-Digest"))),
            ("sha256", _first(_DIGEST, headers.get("Content-Digest"))),
        ]
        decoded = [(name, _decode_base64(value)) for name, value in header_digests if value]
        self._expected = [(hashlib.new(name, usedforsecurity=False), value) for name, value in decoded if value]
        self._expected = [(hasher, value) for hasher, value in self._expected if len(value) == hasher.digest_size]

    def update(self, piece: bytes) -> None:
        """Add the next bytes of the file."""
        for hasher, _ in self._expected:
            hasher.update(piece)

    def check(self) -> None:
        """Raise Transient unless the file matches the server's checksums."""
        for hasher, value in self._expected:
            if hasher.digest() != value:
                raise Transient(f"the file should have {hasher.name} {value.hex()}, but has {hasher.hexdigest()}")


def stored_md5(headers: Mapping[str, str]) -> bytes | None:
    """Return the MD5 of the stored file from the answer to a PUT, None if the answer has none."""
    value = _first(_GOOGLE, _all(headers, "x-goog-hash"))
    if value is None and "x-ms-request-id" in headers:
        value = headers.get("Content-MD5")
    if value is not None:
        return _decode_base64(value)
    etag = _MD5_ETAG.fullmatch(headers.get("ETag", ""))
    if etag is None or not any(name in headers for name in _STORES) or _is_encrypted(headers):
        return None
    return bytes.fromhex(etag[1])


def content_md5(path: Path) -> bytes:
    """Return the MD5 of this file."""
    hasher = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(MIB):
            hasher.update(piece)
    return hasher.digest()


def in_header(md5: bytes) -> str:
    """Return the value of a Content-MD5 header."""
    return base64.b64encode(md5).decode()


def _is_encrypted(headers: Mapping[str, str]) -> bool:
    """Return whether the store's encryption changes its ETag; S3's own AES256 does not."""
    encryption = {name.lower(): value for name, value in headers.items() if "server-side-encryption" in name.lower()}
    return bool(encryption) and encryption != {"x-amz-server-side-encryption": "AES256"}


def _all(headers: Mapping[str, str], name: str) -> str:
    """Return the joined values of a header that may be repeated."""
    return ",".join(value for header, value in headers.items() if header.lower() == name)


def _first(pattern: re.Pattern[str], value: str | None) -> str | None:
    found = pattern.search(value or "")
    return found[1] if found else None


def _decode_base64(value: str) -> bytes | None:
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error:
        return None
