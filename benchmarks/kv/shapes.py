"""The KV shapes and block tables of the KV benchmark: the default model's, and the fake engine's."""

import random
from dataclasses import dataclass

from testing.engine.fake_model import FakeConfig, fake_tensors
from wire.kv_layout import KvTensor, PoolLayout

MIB = 1 << 20
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's KV tensors."""

    name: str
    tensors: tuple[KvTensor, ...]

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token."""
        return sum(tensor.token_bytes for tensor in self.tensors)

    @property
    def num_layers(self) -> int:
        """Layers that hold KV."""
        return len({tensor.layer for tensor in self.tensors})

    def layout(self, num_blocks: int) -> PoolLayout:
        """Return the layout of a pool of `num_blocks` blocks of 16 tokens."""
        return PoolLayout(self.tensors, num_blocks=num_blocks, block_size=BLOCK_SIZE)

    def tokens_of(self, num_bytes: int) -> int:
        """Return how many tokens make up at least `num_bytes`."""
        return -(-num_bytes // self.token_bytes)


def shape_named(name: str) -> Shape:
    """Return "default" (SmolLM2-135M: 30 layers, 3 KV heads of 64, bfloat16) or "fake" (the fake engine's)."""
    if name == "fake":
        return Shape(name, fake_tensors(FakeConfig()))
    assert name == "default", name
    return Shape(name, tuple(KvTensor(layer, side, 3, 64, "bfloat16") for layer in range(30) for side in ("k", "v")))


def block_table(num_blocks: int, first: int, count: int, *, scattered: bool) -> tuple[int, ...]:
    """Return `count` of the pool's blocks, starting at `first`: all adjacent, or none adjacent to its predecessor."""
    assert first + count <= num_blocks, f"blocks [{first}, {first + count}) of {num_blocks}"
    blocks = list(range(first, first + count))
    if not scattered:
        return tuple(blocks)
    even, odd, source = blocks[::2], blocks[1::2], random.Random(1)
    source.shuffle(even)
    source.shuffle(odd)
    if even and odd and odd[0] == even[-1] + 1:
        even.reverse()
    return (*even, *odd) if len(even) > 1 else (*odd, *even)
