"""Where the tokens of a frame lie in a pool, found once a chunk and reused for every tensor of that slot size."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from kvtransfer.digest import Place, Region, Runs
from wire.kv_layout import Heads, PoolLayout


class Window(NamedTuple):
    """Tokens [start, end) of a block table cut to the blocks that hold them; `start` counts from the first of these."""

    block_ids: tuple[int, ...]
    start: int
    end: int


def window(block_ids: Sequence[int], block_size: int, start: int, end: int) -> Window:
    """Cut `block_ids` (block i holds tokens [i * block_size, ...)) to tokens [start, end)."""
    first = start // block_size
    return Window(tuple(block_ids[first : -(-end // block_size)]), start - first * block_size, end - first * block_size)


class SlotMap:
    """Turns windows into places of one pool. Immutable but for small caches; it keeps the memory mapped."""

    def __init__(self, layout: PoolLayout, memory: memoryview | Region) -> None:
        self.layout = layout
        self._region = memory if isinstance(memory, Region) else Region(memory)
        self._spans = functools.lru_cache(maxsize=64)(self._find_spans)
        self._runs = functools.lru_cache(maxsize=256)(self._make_runs)

    def place(self, tensor: int, where: Window, heads: Heads | None = None) -> Place:
        """Return where these heads (None: all held) of one tensor's tokens lie, in order: [token][head][dim].

        Raises IndexError for a block past the pool, ValueError for heads that are not held here.
        """
        slot_bytes, held = self.layout.tensors[tensor].token_bytes, self.layout.heads[tensor]
        if heads is None or heads == held:
            return Place(self._region, self.layout.offsets[tensor], self._runs(where, slot_bytes, 0, slot_bytes))
        if not held.start <= heads.start < heads.end <= held.end:
            raise ValueError(f"heads {heads} of tensor {tensor} are named, {held} are held")
        head_bytes = self.layout.tensors[tensor].head_bytes
        skip, row_bytes = (heads.start - held.start) * head_bytes, (heads.end - heads.start) * head_bytes
        return Place(self._region, self.layout.offsets[tensor], self._runs(where, slot_bytes, skip, row_bytes))

    def _make_runs(self, where: Window, slot_bytes: int, skip: int, row_bytes: int) -> Runs:
        return Runs.of_slots(self._spans(where), slot_bytes, skip=skip, row_bytes=row_bytes)

    def _find_spans(self, where: Window) -> tuple[tuple[int, int], ...]:
        return tuple(self.layout.slots(where.block_ids, where.start, where.end))
