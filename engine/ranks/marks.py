"""The memory that all ranks of an instance share: how far each has come, whether one is lost, and room for sums.

When a step hangs, the rank that is behind is named by its count. The layout is native/ranks.c's.
"""

import ctypes
import mmap
import os

from native.ranks import LINE_BYTES, shared_bytes

SLOT_BYTES = 1 << 20


class Marks:
    """One counter a rank; each rank advances its own. Owns its mapping, which lives as long as this, not `fd`."""

    def __init__(self, fd: int, num_ranks: int) -> None:
        """`fd` is of memory that `make_marks` made."""
        self._mapping = mmap.mmap(fd, shared_bytes(num_ranks, SLOT_BYTES))
        self._anchor = ctypes.c_char.from_buffer(self._mapping)
        self._counts = memoryview(self._mapping).cast("Q")
        self._num_ranks = num_ranks

    @property
    def address(self) -> int:
        """Where the memory lies in this process."""
        return ctypes.addressof(self._anchor)

    def advance(self, rank: int) -> None:
        """Count one more piece of work as begun."""
        self._counts[rank * LINE_BYTES // 8] += 1

    def behind(self) -> tuple[int, ...]:
        """Return the ranks that have come least far, none where all are equal."""
        counts = [self._counts[rank * LINE_BYTES // 8] for rank in range(self._num_ranks)]
        return tuple(rank for rank, count in enumerate(counts) if count < max(counts) and count == min(counts))

    def abort(self) -> None:
        """End the sums that wait and those to come: a rank is lost."""
        self._counts[self._num_ranks * LINE_BYTES // 8] = 1

    @property
    def is_aborted(self) -> bool:
        """Whether a rank is lost."""
        return bool(self._counts[self._num_ranks * LINE_BYTES // 8])


def make_marks(num_ranks: int) -> int:
    """Return the descriptor of fresh memory, the caller's to close; pages cost memory once used."""
    fd = os.memfd_create("pdserve-ranks", os.MFD_CLOEXEC)
    os.ftruncate(fd, shared_bytes(num_ranks, SLOT_BYTES))
    return fd
