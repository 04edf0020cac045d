"""Where the tokens of a frame lie in a pool, found once a chunk and reused for every tensor of that slot size."""

from collections.abc import Sequence

from kvtransfer.digest import Place, Region, Runs
from wire.kv_layout import Heads, PoolLayout

_MAX_WINDOWS = 64


class Window:
    """Tokens [start, end) of a block table cut to the blocks that hold them; `start` counts from the first of these.

    It keeps the runs that were worked out for it, by the tensors' distances, slot sizes and heads: so it is used with
    one pool, and again and again.
    """

    __slots__ = ("block_ids", "end", "runs", "start")

    def __init__(self, block_ids: tuple[int, ...], start: int, end: int) -> None:
        self.block_ids, self.start, self.end = block_ids, start, end
        self.runs: dict[tuple[tuple[int, int, int, int], ...], Runs] = {}


def window(block_ids: Sequence[int], block_size: int, start: int, end: int) -> Window:
    """Cut `block_ids` (block i holds tokens [i * block_size, ...)) to tokens [start, end)."""
    first = start // block_size
    return Window(tuple(block_ids[first : -(-end // block_size)]), start - first * block_size, end - first * block_size)


class Windows:
    """The windows of one growing block table, each cut once for all tensors of all layers. Keeps the last few."""

    def __init__(self) -> None:
        self._cut: dict[tuple[int, int], tuple[Sequence[int], Window]] = {}

    def of(self, block_ids: Sequence[int], block_size: int, start: int, end: int) -> Window:
        """Return the window of tokens [start, end)."""
        known = self._cut.get((start, end))
        if known is not None and (known[0] is block_ids or known[0] == block_ids):
            return known[1]
        if len(self._cut) >= _MAX_WINDOWS:
            self._cut.clear()
        where = window(block_ids, block_size, start, end)
        self._cut[start, end] = block_ids, where
        return where


class SlotMap:
    """Turns windows into places of one pool. Immutable; it keeps the memory mapped."""

    def __init__(self, layout: PoolLayout, memory: memoryview | Region) -> None:
        self.layout = layout
        self._region = memory if isinstance(memory, Region) else Region(memory)

    def place(self, tensor: int, where: Window, heads: Heads | None = None, num_tensors: int = 1) -> Place:
        """Return where these heads (None: all held) of the tensors' tokens lie, in order: [tensor][token][head][dim].

        Raises IndexError for a block past the pool, ValueError for heads that are not held here.
        """
        base = self.layout.offsets[tensor]
        key = tuple(self._row(one, base, heads) for one in range(tensor, tensor + num_tensors))
        runs = where.runs.get(key)
        if runs is None:
            spans = list(self.layout.slots(where.block_ids, where.start, where.end))
            made = [
                (distance, Runs.of_slots(spans, slot_bytes, skip=skip, row_bytes=row_bytes))
                for distance, slot_bytes, skip, row_bytes in key
            ]
            runs = where.runs[key] = made[0][1] if num_tensors == 1 else Runs.joined(made)
        return Place(self._region, base, runs)

    def _row(self, tensor: int, base: int, heads: Heads | None) -> tuple[int, int, int, int]:
        """Return how far from `base` the tensor starts, its bytes a slot, and the heads' first byte and bytes there."""
        spec, held = self.layout.tensors[tensor], self.layout.heads[tensor]
        distance, slot_bytes = self.layout.offsets[tensor] - base, spec.token_bytes
        if heads is None or heads == held:
            return distance, slot_bytes, 0, slot_bytes
        if not held.start <= heads.start < heads.end <= held.end:
            raise ValueError(f"heads {heads} of tensor {tensor} are named, {held} are held")
        head_bytes = spec.head_bytes
        return distance, slot_bytes, (heads.start - held.start) * head_bytes, (heads.end - heads.start) * head_bytes
