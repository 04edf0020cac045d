"""How the KV cache of one instance lies in memory, and what two instances must agree on.

A pool is one piece of memory. Each KV tensor of each layer is `[num_blocks, block_size, heads, head_dim]`, and the
tensors follow each other at aligned offsets:

    pool   | layer 0 k | layer 0 v | layer 1 k | layer 1 v | ...
    tensor | block 0 | block 1 | ...
    block  | slot 0 | slot 1 | ...

The wire names (tensor, token range), never an address; each side finds its own slots from its own block table.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ALIGNMENT = 4096
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KvTensor:
    """One KV tensor of one layer. `heads` x `head_dim` elements of `dtype` for every token."""

    layer: int
    name: str
    heads: int
    head_dim: int
    dtype: str

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
    """Where every token of every block lies. Immutable."""

    def __init__(self, tensors: Sequence[KvTensor], *, num_blocks: int, block_size: int) -> None:
        if not tensors or num_blocks <= 0 or block_size <= 0:
            raise ValueError(f"a pool needs tensors, blocks and slots: {len(tensors)}, {num_blocks}, {block_size}")
        self.tensors = tuple(tensors)
        self.num_blocks = num_blocks
        self.block_size = block_size
        offsets, offset = [], 0
        for tensor in self.tensors:
            offsets.append(offset)
            size = num_blocks * block_size * tensor.token_bytes
            offset += -(-size // ALIGNMENT) * ALIGNMENT
        self.offsets = tuple(offsets)
        self.total_bytes = offset

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all tensors."""
        return sum(tensor.token_bytes for tensor in self.tensors)

    @property
    def num_layers(self) -> int:
        """Layers that hold KV."""
        return len({tensor.layer for tensor in self.tensors})

    def tensors_of(self, layer: int) -> list[int]:
        """Return the indices of the tensors of `layer`."""
        return [i for i, tensor in enumerate(self.tensors) if tensor.layer == layer]

    def runs(self, tensor: int, block_ids: Sequence[int], start: int, end: int) -> Iterator[ByteRun]:
        """Yield the bytes of tokens [start, end) of a sequence whose block table is `block_ids`, in token order.

        Neighbouring blocks are joined into one run. Raises IndexError for a token past the table or a block past the
        pool.
        """
        spec, base, size = self.tensors[tensor], self.offsets[tensor], self.block_size
        pending: ByteRun | None = None
        token = start
        while token < end:
            block = block_ids[token // size]
            if not 0 <= block < self.num_blocks:
                raise IndexError(f"block {block} is outside the pool of {self.num_blocks} blocks")
            count = min(end - token, size - token % size)
            run = ByteRun(base + (block * size + token % size) * spec.token_bytes, count * spec.token_bytes)
            if pending is not None and pending.offset + pending.length == run.offset:
                pending = ByteRun(pending.offset, pending.length + run.length)
            else:
                if pending is not None:
                    yield pending
                pending = run
            token += count
        if pending is not None:
            yield pending

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


def describe_difference(mine: Sequence[KvTensor], theirs: Sequence[KvTensor]) -> str | None:
    """Return in words the first difference that the wire cannot bridge, both values in it, or None."""
    if len(mine) != len(theirs):
        return f"KV tensors: {len(mine)} here, {len(theirs)} there"
    for a, b in zip(mine, theirs, strict=True):
        if a != b:
            return f"KV tensor of layer {a.layer}: {_words(a)} here, {_words(b)} there"
    return None


def _words(tensor: KvTensor) -> str:
    return f"{tensor.name} {tensor.heads}x{tensor.head_dim} {tensor.dtype}"
