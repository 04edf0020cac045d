"""xxh3-64 over the wire layout, and copies between non-contiguous ranges of bytes, both in one pass.

    mover = make_mover(os.environ)                    # native functions, or Python without them (mover.py)
    pool = Region(memory.buffer)                      # once per pool or mapping, which may be read-only
    runs = Runs.of_slots(spans, token_bytes)          # once per window of blocks, for all tensors of that size
    digest = mover.copy_and_digest(Place(peer, peer_base, peer_runs), Place(pool, base, runs), stop)

`base` is the tensor's start in its pool, so a frame costs two Places and one call. A head range is
`Runs.of_slots(spans, token_bytes, skip=..., row_bytes=...)`. Source and target may be split differently, but must
have the same number of bytes. `stop` is a StopFlag set by the thread that ends the ticket; it is checked every 256 KiB.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import xxhash

from native.memory import MemoryRun, Region, RegionRuns, Runs, StopFlag, check_move, check_place
from native.move_library import load
from wire.errors import ConfigError

__all__ = [
    "MemoryRun",
    "Mover",
    "PythonMover",
    "Region",
    "RegionRuns",
    "Runs",
    "StopFlag",
    "digest_of",
    "make_mover",
]  # fmt: skip

_PIECE_BYTES = 256 << 10


class Mover(Protocol):
    """Copies and digests runs. Thread-safe. Implemented by native.move_library.Library and PythonMover."""

    @property
    def name(self) -> str:
        """Name of the implementation, for status and logs."""
        ...

    def digest(self, place: RegionRuns) -> int:
        """Return XXH3-64 of the concatenated runs. Raises IndexError for runs past the region."""
        ...

    def copy(self, source: RegionRuns, target: RegionRuns, stop: StopFlag) -> bool:
        """Fill the target's runs from the source's; return False if `stop` was set in the meantime.

        Raises IndexError for runs past their region, ValueError for unequal sizes and a read-only target.
        """
        ...

    def copy_and_digest(self, source: RegionRuns, target: RegionRuns, stop: StopFlag) -> int | None:
        """Copy like `copy` and return XXH3-64 of the written bytes; None if `stop` was set in the meantime."""
        ...


class PythonMover:
    """A Mover that uses memoryviews and xxhash: several times slower, and it holds the GIL between pieces."""

    name = "python"

    def digest(self, place: RegionRuns) -> int:
        """See Mover."""
        check_place(place)
        return digest_of(_rows_of(place))

    def copy(self, source: RegionRuns, target: RegionRuns, stop: StopFlag) -> bool:
        """See Mover."""
        check_move(source, target)
        budget = 0
        for left, right in _cut_alike(_rows_of(source), _rows_of(target)):
            if budget <= 0:
                if stop.is_set():
                    return False
                budget = _PIECE_BYTES
            right[:] = left
            budget -= len(right)
        return not stop.is_set()

    def copy_and_digest(self, source: RegionRuns, target: RegionRuns, stop: StopFlag) -> int | None:
        """See Mover."""
        check_move(source, target)
        hasher, budget = xxhash.xxh3_64(), 0
        for left, right in _cut_alike(_rows_of(source), _rows_of(target)):
            if budget <= 0:
                if stop.is_set():
                    return None
                budget = _PIECE_BYTES
            right[:] = left
            hasher.update(right)
            budget -= len(right)
        return None if stop.is_set() else int(hasher.intdigest())


def make_mover(environ: Mapping[str, str]) -> Mover:
    """Return the native functions, or the Python mover without them. Raises ConfigError for a bad PDSERVE_NATIVE."""
    try:
        return load(environ) or PythonMover()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def digest_of(pieces: Iterable[memoryview | bytes]) -> int:
    """Return the digest of the concatenated pieces."""
    hasher = xxhash.xxh3_64()
    for piece in pieces:
        hasher.update(piece)
    return int(hasher.intdigest())


def _rows_of(place: RegionRuns) -> Iterator[memoryview]:
    view, base = place.region.view, place.base
    for offset, num_bytes in place.runs.rows():
        yield view[base + offset : base + offset + num_bytes]


def _cut_alike(sources: Iterator[memoryview], targets: Iterator[memoryview]) -> Iterator[tuple[memoryview, memoryview]]:
    source, target = memoryview(b""), memoryview(b"")
    while True:
        source, target = source or next(sources, source), target or next(targets, target)
        count = min(len(source), len(target), _PIECE_BYTES)
        if count == 0:
            return
        yield source[:count], target[:count]
        source, target = source[count:], target[count:]
