"""How the KV cache of one instance is laid out in memory, and what two instances must agree on.

A pool is one piece of memory. Each KV tensor of each layer is `[num_blocks, block_size, heads, head_dim]`, and the
tensors follow each other at aligned offsets:

    pool   | layer 0 k | layer 0 v | layer 1 k | layer 1 v | ...
    tensor | block 0 | block 1 | ...
    block  | slot 0 | slot 1 | ...

An instance has one pool per rank, all with the same blocks; each stores its own heads of every tensor, so its slots
are as wide as these heads. Messages name a tensor, a token range and a head range, never an address; each side maps
them to slots with its own block table.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

ALIGNMENT = 4096
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_RANKS = 256


class Rank(NamedTuple):
    """Rank `number` of `of` ranks, counted from 0."""

    number: int = 0
    of: int = 1

    def __str__(self) -> str:
        return f"rank {self.number} of {self.of}"


class Heads(NamedTuple):
    """Heads [start, end) of one KV tensor, counted over the whole model."""

    start: int
    end: int

    def __str__(self) -> str:
        return f"[{self.start}, {self.end})"


ONLY_RANK = Rank()


def check_rank(rank: Rank) -> None:
    """Raise ValueError, with value and limit, for an impossible rank."""
    if not 0 < rank.of <= MAX_RANKS or not 0 <= rank.number < rank.of:
        raise ValueError(f"{rank}: ranks count from 0, and an instance has at most {MAX_RANKS}")


def head_range(heads: int, rank: Rank) -> Heads:
    """Return the KV heads that a rank stores: whole ones; if they do not divide evenly, the first ranks store one more.

    3 heads on 2 ranks are 2 and 1. With more ranks than heads, heads are replicated: each rank stores one.
    """
    if rank.of > heads:
        head = rank.number * heads // rank.of
        return Heads(head, head + 1)
    each, over = divmod(heads, rank.of)
    start = rank.number * each + min(rank.number, over)
    return Heads(start, start + each + (rank.number < over))


def ranks_holding(head: int, heads: int, num_ranks: int) -> range:
    """Return the contiguous ranks of `num_ranks` that store `head`: those whose `head_range` contains it."""
    if num_ranks > heads:
        return range(-(-head * num_ranks // heads), -(-(head + 1) * num_ranks // heads))
    each, over = divmod(heads, num_ranks)
    wide = over * (each + 1)
    number = head // (each + 1) if head < wide else over + (head - wide) // each
    return range(number, number + 1)


@dataclass(frozen=True, slots=True)
class KvTensor:
    """One KV tensor of one layer. `heads` x `head_dim` elements of `dtype` for every token."""

    layer: int
    name: str
    heads: int
    head_dim: int
    dtype: str

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token."""
        return self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.heads * self.head_dim * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ByteRun:
    """A contiguous run inside a pool: byte offset and length."""

    offset: int
    length: int


class PoolLayout:
    """The place of every token of every block in one rank's pool. Immutable.

    `model_tensors` are the whole model's KV tensors, `heads` the heads of each that this rank stores, and `tensors` the
    same tensors with only those heads, as in the pool. With one rank they are equal. `token_bytes` are those of one
    token over all tensors of this rank; `layers` those that have KV, ascending: a model may have others.
    """

    def __init__(
        self, tensors: Sequence[KvTensor], *, num_blocks: int, block_size: int, rank: Rank = ONLY_RANK
    ) -> None:  # fmt: skip
        """`tensors` are the model's. Raises ValueError for impossible sizes and ranks."""
        if not tensors or num_blocks <= 0 or block_size <= 0:
            sizes = f"tensors: {len(tensors)}, blocks: {num_blocks}, slots of a block: {block_size}"
            raise ValueError(f"a pool needs at least one of each: {sizes}")
        check_rank(rank)
        self.model_tensors, self.rank = tuple(tensors), rank
        self.heads = tuple(head_range(tensor.heads, rank) for tensor in tensors)
        self.tensors = tuple(
            tensor if rank.of == 1 else replace(tensor, heads=held.end - held.start)
            for tensor, held in zip(tensors, self.heads, strict=True)
        )
        self.num_blocks = num_blocks
        self.block_size = block_size
        offsets, offset = [], 0
        for tensor in self.tensors:
            offsets.append(offset)
            size = num_blocks * block_size * tensor.token_bytes
            offset += -(-size // ALIGNMENT) * ALIGNMENT
        self.offsets = tuple(offsets)
        self.total_bytes = offset
        self.token_bytes = sum(tensor.token_bytes for tensor in self.tensors)
        self.layers = tuple(sorted({tensor.layer for tensor in self.tensors}))

    @property
    def num_layers(self) -> int:
        """Layers that have KV."""
        return len(self.layers)

    def tensors_of(self, layer: int) -> list[int]:
        """Return the indices of the tensors of `layer`."""
        return [i for i, tensor in enumerate(self.tensors) if tensor.layer == layer]

    def slots(self, block_ids: Sequence[int], start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield (first slot, slots) of tokens [start, end) of a sequence with this block table, in token order.

        They are the same for every tensor and every rank. Adjacent runs are merged. Raises IndexError for a token
        beyond the table or a block beyond the pool.
        """
        size, first, count, token = self.block_size, 0, 0, start
        while token < end:
            block = block_ids[token // size]
            if not 0 <= block < self.num_blocks:
                raise IndexError(f"block {block} is outside the pool of {self.num_blocks} blocks")
            slot, here = block * size + token % size, min(end - token, size - token % size)
            if first + count == slot and count:
                count += here
            else:
                if count:
                    yield first, count
                first, count = slot, here
            token += here
        if count:
            yield first, count

    def runs(self, tensor: int, block_ids: Sequence[int], start: int, end: int) -> Iterator[ByteRun]:
        """Yield the byte runs of tokens [start, end), all heads of this rank, at their `slots`. Raises IndexError."""
        base, size = self.offsets[tensor], self.tensors[tensor].token_bytes
        for first, count in self.slots(block_ids, start, end):
            yield ByteRun(base + first * size, count * size)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)


def describe_difference(mine: Sequence[KvTensor], theirs: Sequence[KvTensor]) -> str | None:
    """Describe the first difference of two models' tensors with both values; None if there is none.

    Any such difference makes two instances incompatible; ranks and block size, which may differ, are not compared.
    """
    counts = f"KV tensors: {len(mine)} here, {len(theirs)} there; " if len(mine) != len(theirs) else ""
    for layer in sorted({tensor.layer for tensor in (*mine, *theirs)}):
        here, there = ([tensor for tensor in side if tensor.layer == layer] for side in (mine, theirs))
        if [one.name for one in here] == [one.name for one in there]:  # show only the first that differs
            pairs = [(a, b) for a, b in zip(here, there, strict=True) if a != b][:1]
            here, there = [a for a, _ in pairs], [b for _, b in pairs]
        if here != there:
            return f"{counts}KV of layer {layer}: {_text(here)} here, {_text(there)} there"
    if [*mine] != [*theirs]:
        return f"order of KV tensors: layers {_order(mine)} here, {_order(theirs)} there"
    return None


def _text(tensors: Sequence[KvTensor]) -> str:
    return ", ".join(f"{one.name} {one.heads}x{one.head_dim} {one.dtype}" for one in tensors) or "none"


def _order(tensors: Sequence[KvTensor]) -> str:
    return " ".join(str(tensor.layer) for tensor in tensors)
