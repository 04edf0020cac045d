"""How far each rank has come, in memory that all of them see: when a step hangs, the one that is behind is named."""

import mmap
import os

_ITEM = 64  # bytes: a cache line each, so that ranks do not slow each other


class Marks:
    """One counter a rank; each rank advances its own. Owns its mapping, not the descriptor."""

    def __init__(self, fd: int, num_ranks: int) -> None:
        """`fd` is of memory that `make_marks` made."""
        self._mapping = mmap.mmap(fd, num_ranks * _ITEM)
        self._counts = memoryview(self._mapping).cast("Q")
        self._num_ranks = num_ranks

    def advance(self, rank: int) -> None:
        """Count one more piece of work as begun."""
        self._counts[rank * _ITEM // 8] += 1

    def behind(self) -> tuple[int, ...]:
        """Return the ranks that have come least far, none where all are equal."""
        counts = [self._counts[rank * _ITEM // 8] for rank in range(self._num_ranks)]
        return tuple(rank for rank, count in enumerate(counts) if count < max(counts) and count == min(counts))

    def close(self) -> None:
        """Give the mapping back. Idempotent."""
        self._counts.release()
        self._mapping.close()


def make_marks(num_ranks: int) -> int:
    """Return the descriptor of fresh counters, the caller's to close."""
    fd = os.memfd_create("pdserve-marks", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_ranks * _ITEM)
    return fd
