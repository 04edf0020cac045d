"""The checksums that a server sends with a file, and that are sent with one."""

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from batch.remote.limits import MIB
from batch.remote.retries import Transient

_DIGEST = re.compile(r"\bsha-256=:([A-Za-z0-9+/=]+):")
_GOOGLE = re.compile(r"\bmd5=([A-Za-z0-9+/=]+)")


class Digests:
    """Checks one file against the checksums of its answer's headers, where they tell a whole file's md5 or sha-256.

    An ETag is none: what it holds is the server's own affair.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        told = [
            ("md5", headers.get("Content-MD5")),
            ("md5", _first(_GOOGLE, headers.get("x-goog-hash"))),
            ("sha256", headers.get("x-amz-checksum-sha256")),
            ("sha256", _first(_DIGEST, headers.get("Repr-Digest"))),
            ("sha256", _first(_DIGEST, headers.get("Content-Digest"))),
        ]
        decoded = [(name, _decoded(value)) for name, value in told if value]
        self._expected = [(hashlib.new(name, usedforsecurity=False), value) for name, value in decoded if value]
        self._expected = [(hasher, value) for hasher, value in self._expected if len(value) == hasher.digest_size]

    def update(self, piece: bytes) -> None:
        """Take the next bytes of the file."""
        for hasher, _ in self._expected:
            hasher.update(piece)

    def check(self) -> None:
        """Raise Transient unless the file is the one the server spoke of."""
        for hasher, value in self._expected:
            if hasher.digest() != value:
                raise Transient(f"the file came with {hasher.name} {value.hex()} and is {hasher.hexdigest()}")


def content_md5(path: Path) -> str:
    """Return the value of a Content-MD5 header for this file."""
    hasher = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(MIB):
            hasher.update(piece)
    return base64.b64encode(hasher.digest()).decode()


def _first(pattern: re.Pattern[str], value: str | None) -> str | None:
    found = pattern.search(value or "")
    return found[1] if found else None


def _decoded(value: str) -> bytes | None:
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error:
        return None
