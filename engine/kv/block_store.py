"""Copies of a host pool's blocks in ordinary memory: one rank's part of the swap area."""

import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from devices.interface import Memory
from native.memory import Region, RegionRuns, Runs, StopFlag

_EXTENT_BYTES = 16 << 20  # allocated at once


class Copier(Protocol):
    """Copies runs of memory (native.move_library.Library), without the GIL if that is worthwhile."""

    def copy(self, source: RegionRuns, target: RegionRuns, stop: StopFlag) -> bool:
        """Copy the source's runs to the target's."""
        ...


class _Span(NamedTuple):
    """Blocks that are contiguous in the pool and whose copies are contiguous in one extent."""

    block: int
    slot: int
    num_blocks: int


class BlockStore:
    """Owner of the copies, one per slot; a slot takes memory at its first use and keeps it for later ones.

    Slots are contiguous in extents, and the tensors of a block are contiguous in its slot.
    """

    def __init__(self, memory: Memory, make_copier: Callable[[], Copier | None] = lambda: None) -> None:
        """`make_copier` is called once, at the first copy; if it returns None, Python copies, five times slower."""
        layout = memory.layout
        self._memory = memory
        self._sizes = [layout.block_size * tensor.token_bytes for tensor in layout.tensors]
        self._offsets = tuple(layout.offsets)
        self._starts = [sum(self._sizes[:tensor]) for tensor in range(len(self._sizes))]
        self._slot_bytes = sum(self._sizes)
        self._extent_slots = max(1, _EXTENT_BYTES // self._slot_bytes)
        self._extents: dict[int, memoryview] = {}
        self._make_copier: Callable[[], Copier | None] | None = make_copier
        self._copier: Copier | None = None

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy all tensors of each block into its slot."""
        self._copy(block_ids, slots, save=True)

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy each slot back into its block."""
        self._copy(block_ids, slots, save=False)

    def close(self) -> None:
        """Free the copies. Idempotent."""
        self._extents.clear()

    def _copy(self, block_ids: Sequence[int], slots: Sequence[int], *, save: bool) -> None:
        if self._make_copier is not None:
            self._copier, self._make_copier = self._make_copier(), None
        by_extent: dict[int, list[tuple[int, int]]] = {}
        for block, slot in zip(block_ids, slots, strict=True):
            by_extent.setdefault(slot // self._extent_slots, []).append((block, slot % self._extent_slots))
        for extent, pairs in by_extent.items():
            spans = list(_spans(pairs))
            copies = self._get_extent(extent) if save else self._extents[extent]
            if self._copier is None:
                self._copy_slices(copies, spans, save=save)
            else:
                self._copy_runs(self._copier, copies, spans, save=save)

    def _copy_runs(self, copier: Copier, copies: memoryview, spans: Sequence[_Span], *, save: bool) -> None:
        """Copy all spans in one call, tensor by tensor."""
        in_pool = {size: Runs.of_slots([(s.block, s.num_blocks) for s in spans], size) for size in set(self._sizes)}
        width = self._slot_bytes
        in_slots = {
            size: Runs([(s.slot * width, size, width, s.num_blocks) for s in spans]) for size in set(self._sizes)
        }
        pool_runs = Runs.joined((at, in_pool[size]) for at, size in zip(self._offsets, self._sizes, strict=True))
        slot_runs = Runs.joined((at, in_slots[size]) for at, size in zip(self._starts, self._sizes, strict=True))
        pool, kept = RegionRuns(Region(self._memory.buffer), 0, pool_runs), RegionRuns(Region(copies), 0, slot_runs)
        source, target = (pool, kept) if save else (kept, pool)
        copier.copy(source, target, StopFlag())

    def _copy_slices(self, copies: memoryview, spans: Sequence[_Span], *, save: bool) -> None:
        pool = self._memory.buffer
        for first, slot, num_blocks in spans:
            for number in range(num_blocks):
                for offset, start, size in zip(self._offsets, self._starts, self._sizes, strict=True):
                    at = offset + (first + number) * size
                    kept = (slot + number) * self._slot_bytes + start
                    if save:
                        copies[kept : kept + size] = pool[at : at + size]
                    else:
                        pool[at : at + size] = copies[kept : kept + size]

    def _get_extent(self, number: int) -> memoryview:
        extent = self._extents.get(number)
        if extent is None:
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            extent = memoryview(mmap.mmap(-1, self._extent_slots * self._slot_bytes, flags=private))
            self._extents[number] = extent
        return extent


def _spans(pairs: Sequence[tuple[int, int]]) -> Iterator[_Span]:
    """Yield (block, slot) pairs as spans; pairs that are consecutive in both are joined."""
    at = 0
    while at < len(pairs):
        (block, slot), count = pairs[at], 1
        while at + count < len(pairs) and pairs[at + count] == (block + count, slot + count):
            count += 1
        yield _Span(block, slot, count)
        at += count
