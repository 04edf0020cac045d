"""The memory that all ranks of an instance share: their progress, whether one is lost, and buffers for sums.

When a step hangs, the counts show which rank is behind. The layout is that of native/ranks.c.
"""

import ctypes
import mmap
import os

from native.ranks import LINE_BYTES, shared_bytes

SLOT_BYTES = 1 << 20


class Marks:
    """One counter per rank; each rank advances its own. Owns the mapping, but not `fd`."""

    def __init__(self, fd: int, num_ranks: int) -> None:
        """`fd` is the descriptor from `make_marks`."""
        self._mapping = mmap.mmap(fd, shared_bytes(num_ranks, SLOT_BYTES))
        self._anchor = ctypes.c_char.from_buffer(self._mapping)
        self._counts = memoryview(self._mapping).cast("Q")
        self._num_ranks = num_ranks

    @property
    def address(self) -> int:
        """The address of the memory in this process."""
        return ctypes.addressof(self._anchor)

    def advance(self, rank: int, count: int = 1) -> None:
        """Count more pieces of work as started."""
        self._counts[rank * LINE_BYTES // 8] += count

    def slowest(self) -> tuple[int, ...]:
        """Return the ranks with the lowest count, none where all are equal."""
        counts = [self._counts[rank * LINE_BYTES // 8] for rank in range(self._num_ranks)]
        return tuple(rank for rank, count in enumerate(counts) if count < max(counts) and count == min(counts))

    def abort(self) -> None:
        """Fail all waiting and later sums: a rank is lost."""
        self._counts[self._num_ranks * LINE_BYTES // 8] = 1

    @property
    def is_aborted(self) -> bool:
        """Whether a rank is lost."""
        return bool(self._counts[self._num_ranks * LINE_BYTES // 8])


def make_marks(num_ranks: int) -> int:
    """Return the descriptor of new memory, which the caller closes; only used pages take memory."""
    fd = os.memfd_create("pdserve-ranks", os.MFD_CLOEXEC)
    os.ftruncate(fd, shared_bytes(num_ranks, SLOT_BYTES))
    return fd
