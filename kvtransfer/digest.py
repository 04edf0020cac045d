"""xxh3-64 over the wire layout, from memory that lies in pieces."""

from collections.abc import Callable, Iterable

import xxhash

_PIECE_BYTES = 256 << 10


def digest_of(pieces: Iterable[memoryview | bytes]) -> int:
    """Return the digest of the pieces one after another."""
    hasher = xxhash.xxh3_64()
    for piece in pieces:
        hasher.update(piece)
    return int(hasher.intdigest())


def copy_and_digest(
    pairs: Iterable[tuple[memoryview, memoryview]], *, stopped: Callable[[], bool], piece_bytes: int = _PIECE_BYTES
) -> int | None:
    """Copy each (source, target) of equal length and digest the targets in the same pass, while they are in cache.

    Returns None as soon as `stopped` says so; it is asked before every `piece_bytes` are written.
    """
    hasher = xxhash.xxh3_64()
    budget = 0
    for source, target in pairs:
        for at in range(0, len(target), piece_bytes):
            if budget <= 0:
                if stopped():
                    return None
                budget = piece_bytes
            if len(target) > piece_bytes:
                piece = target[at : at + piece_bytes]
                piece[:] = source[at : at + piece_bytes]
            else:  # no slices: most pieces of a fragmented pool are one small block
                piece = target
                piece[:] = source
            hasher.update(piece)
            budget -= len(piece)
    return int(hasher.intdigest())
