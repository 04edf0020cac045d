"""Positions of a frame's tokens in a pool, computed once per chunk and reused for every tensor of that slot size."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from kvtransfer.digest import Region, RegionRuns, Runs
from wire.kv_layout import Heads, PoolLayout

_MAX_WINDOWS = 64


class _Row(NamedTuple):
    """The bytes of some heads in each slot of a tensor."""

    slot_bytes: int
    skip: int
    num_bytes: int


class BlockWindow:
    """Tokens [start, end) and the blocks that hold them; `start` counts from the beginning of the first block.

    A window caches its runs by slot size, heads and number of tensors: use it with one pool only, and reuse it.
    """

    __slots__ = ("block_ids", "end", "runs", "start")

    def __init__(self, block_ids: tuple[int, ...], start: int, end: int) -> None:
        self.block_ids, self.start, self.end = block_ids, start, end
        self.runs: dict[tuple[_Row, int], Runs] = {}


def window(block_ids: Sequence[int], block_size: int, start: int, end: int) -> BlockWindow:
    """Cut `block_ids` (block i holds tokens [i * block_size, ...)) to tokens [start, end)."""
    first = start // block_size
    return BlockWindow(
        tuple(block_ids[first : -(-end // block_size)]), start - first * block_size, end - first * block_size
    )


class Windows:
    """The windows of one growing block table, each cut once for all tensors of all layers. Keeps the last few."""

    def __init__(self) -> None:
        self._cut: dict[tuple[int, int], tuple[Sequence[int], BlockWindow]] = {}

    def of(self, block_ids: Sequence[int], block_size: int, start: int, end: int) -> BlockWindow:
        """Return the window of tokens [start, end)."""
        known = self._cut.get((start, end))
        if known is not None and (known[0] is block_ids or known[0] == block_ids):
            return known[1]
        if len(self._cut) >= _MAX_WINDOWS:
            self._cut.clear()
        block_window = window(block_ids, block_size, start, end)
        self._cut[start, end] = block_ids, block_window
        return block_window


class SlotMap:
    """Maps windows to places in one pool. Immutable; it keeps the memory mapped."""

    def __init__(self, layout: PoolLayout, memory: memoryview | Region) -> None:
        self.layout = layout
        self._region = memory if isinstance(memory, Region) else Region(memory)
        self._num_equal = _count_equal(layout)

    def place(
        self, tensor: int, block_window: BlockWindow, heads: Heads | None = None, num_tensors: int = 1
    ) -> RegionRuns:
        """Return the place of these heads (None: all held) of the tensors' tokens: [tensor][token][head][dim].

        Raises IndexError for a block or a tensor past the pool, ValueError for heads that the pool does not hold.
        """
        last = tensor + num_tensors
        if last > len(self._num_equal):
            raise IndexError(f"tensors [{tensor}, {last}) are out of range: the pool has {len(self._num_equal)}")
        offsets = self.layout.offsets
        base, row = offsets[tensor], self._row(tensor, heads)
        if num_tensors == 1:
            return RegionRuns(self._region, base, self._runs(block_window, row))
        if num_tensors <= self._num_equal[tensor]:
            return RegionRuns(
                self._region, base, self._runs(block_window, row, num_tensors, offsets[tensor + 1] - base)
            )
        parts = [(offsets[one] - base, self._runs(block_window, self._row(one, heads))) for one in range(tensor, last)]
        return RegionRuns(self._region, base, Runs.joined(parts))

    def _runs(self, block_window: BlockWindow, row: _Row, num_tensors: int = 1, step: int = 0) -> Runs:
        """Return the runs of tensors with equal slots, `step` bytes apart (`step` follows from the slot size)."""
        key = row, num_tensors
        runs = block_window.runs.get(key)
        if runs is None:
            if num_tensors > 1:
                runs = self._runs(block_window, row).repeated(num_tensors, step)
            else:
                spans = self.layout.slots(block_window.block_ids, block_window.start, block_window.end)
                runs = Runs.of_slots(spans, row.slot_bytes, skip=row.skip, row_bytes=row.num_bytes)
            block_window.runs[key] = runs
        return runs

    def _row(self, tensor: int, heads: Heads | None) -> _Row:
        spec, held = self.layout.tensors[tensor], self.layout.heads[tensor]
        if heads is None or heads == held:
            return _Row(spec.token_bytes, 0, spec.token_bytes)
        if not held.start <= heads.start < heads.end <= held.end:
            raise ValueError(f"heads {heads} of tensor {tensor} are out of range: the pool holds {held}")
        head_bytes = spec.head_bytes
        skip, num_bytes = (heads.start - held.start) * head_bytes, (heads.end - heads.start) * head_bytes
        return _Row(spec.token_bytes, skip, num_bytes)


def _count_equal(layout: PoolLayout) -> list[int]:
    """Return for each tensor how many in a row, starting with it, have equal slots and heads, so equal distances."""
    kinds = [(one.token_bytes, one.head_bytes, held) for one, held in zip(layout.tensors, layout.heads, strict=True)]
    counts = [1]
    for kind, after in itertools.pairwise(reversed(kinds)):
        counts.append(counts[-1] + 1 if kind == after else 1)
    return counts[::-1]
