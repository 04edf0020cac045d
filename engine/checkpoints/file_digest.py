"""A short digest of a large file: of its size and of pieces spread over it, so that it need not be read whole."""

import hashlib
from pathlib import Path

DIGEST_DIGITS = 12
_PIECES = 64
_PIECE_BYTES = 64 * 1024


def file_digest(file: Path) -> str:
    """Return the same 12 hex digits for the same file on every host."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        for piece in range(_PIECES):
            stream.seek(max(0, size - _PIECE_BYTES) * piece // (_PIECES - 1))
            digest.update(stream.read(_PIECE_BYTES))
    return digest.hexdigest()[:DIGEST_DIGITS]
