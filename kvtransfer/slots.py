"""Where the tokens of a frame lie in a pool, found once a chunk and reused for every tensor of every layer."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from wire.kv_layout import PoolLayout


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens [start, end) of a block table cut to the blocks that hold them; `start` counts from the first of these."""

    block_ids: tuple[int, ...]
    start: int
    end: int


def window(block_ids: Sequence[int], block_size: int, start: int, end: int) -> Window:
    """Cut `block_ids` (block i holds tokens [i * block_size, ...)) to tokens [start, end)."""
    first = start // block_size
    return Window(tuple(block_ids[first : -(-end // block_size)]), start - first * block_size, end - first * block_size)


class SlotMap:
    """Turns windows into slices of one pool. Immutable but for a small cache."""

    def __init__(self, layout: PoolLayout) -> None:
        self.layout = layout
        self.spans = functools.lru_cache(maxsize=64)(self._spans)

    def pieces(self, memory: memoryview, tensor: int, where: Window) -> list[memoryview]:
        """Return the bytes of one tensor's tokens, in order. Raises IndexError for a block past the pool."""
        base, size = self.layout.offsets[tensor], self.layout.tensors[tensor].token_bytes
        return [memory[base + slot * size : base + (slot + count) * size] for slot, count in self.spans(where)]

    def _spans(self, where: Window) -> tuple[tuple[int, int], ...]:
        size = self.layout.tensors[0].token_bytes
        runs = self.layout.runs(0, where.block_ids, where.start, where.end)
        return tuple((run.offset // size, run.length // size) for run in runs)


def pair(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> Iterable[tuple[memoryview, memoryview]]:
    """Return (source, target) pieces of equal length; both sides hold equally many bytes, cut differently."""
    if [*map(len, sources)] == [*map(len, targets)]:
        return zip(sources, targets, strict=True)
    return _cut_alike(sources, targets)


def _cut_alike(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> Iterator[tuple[memoryview, memoryview]]:
    left, right = iter(sources), iter(targets)
    source, target = next(left, None), next(right, None)
    while source is not None and target is not None:
        count = min(len(source), len(target))
        yield source[:count], target[:count]
        source = source[count:] if count < len(source) else next(left, None)
        target = target[count:] if count < len(target) else next(right, None)
    assert source is target is None, "both sides hold equally many bytes"
