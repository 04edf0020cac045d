"""Contiguous memory between a pool and a stream or library: gathered into, scattered from."""

import functools

from kvtransfer.device_memory import DeviceRegion
from kvtransfer.digest import Region, RegionRuns, Runs, StopFlag
from kvtransfer.mover import process_mover

_NEVER = StopFlag()
_SMALL_ROW_BYTES = 4 << 10


class Staging:
    """Contiguous memory of one link. Each part has one user at a time."""

    def __init__(self, memory: memoryview) -> None:
        self._region = Region(memory)
        self._mover = process_mover()

    @property
    def view(self) -> memoryview:
        """The memory as bytes."""
        return self._region.view

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self._region.num_bytes

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self._region.address

    def gather(self, start: int, source: RegionRuns) -> None:
        """Copy the source's runs to `start`, one after another. Raises IndexError if there is no space."""
        self._mover.copy(source, RegionRuns(self._region, start, whole(source.runs.num_bytes)), _NEVER)

    def scatter(self, start: int, target: RegionRuns, stop: StopFlag, *, digests: bool) -> int | None:
        """Copy from `start` to the target's runs; return their digest (0 without `digests`), None if `stop` was set."""
        return move(RegionRuns(self._region, start, whole(target.runs.num_bytes)), target, stop, digests=digests)


def move(source: RegionRuns, target: RegionRuns, stop: StopFlag, *, digests: bool) -> int | None:
    """Copy and return the digest of the written bytes (0 without digests); None if `stop` interrupted it."""
    if digests:
        return process_mover().copy_and_digest(source, target, stop)
    return 0 if process_mover().copy(source, target, stop) else None


def pieces_of(place: RegionRuns) -> list[memoryview]:
    """Return the runs as pieces of their region; scattered small rows and device memory as one copy on the host."""
    region, base, runs = place
    rows = list(runs.rows())
    if isinstance(region, DeviceRegion) or (len(rows) > 1 and runs.num_bytes < _SMALL_ROW_BYTES * len(rows)):
        copy = Staging(memoryview(bytearray(runs.num_bytes)))
        copy.gather(0, place)
        return [copy.view]
    return [region.view[base + offset : base + offset + num_bytes] for offset, num_bytes in rows]


@functools.lru_cache(maxsize=64)
def whole(num_bytes: int) -> Runs:
    """Return one run of `num_bytes` starting at the base."""
    return Runs([(0, num_bytes, 0, 1)] if num_bytes else [])
