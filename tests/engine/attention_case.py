"""One step of attention with an oracle: textbook softmax over whole sequences, in float64."""

import random
from dataclasses import dataclass

import torch

from engine.attention.interface import AttentionBackend, AttentionOptions
from engine.attention.paged import LayerPool, PagedAttention
from engine.step import BatchSequence, StepBatch
from engine.step_metadata import StepMetadata, build

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads, dims and dtypes of a layer and its pool."""

    num_heads: int = 4
    num_kv_heads: int = 2
    key_dim: int = 8
    value_dim: int = 8
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Sequence:
    """The oracle's view of one sequence: all its keys, values and queries, [heads, kv_length, dim]."""

    start: int
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Case:
    """Some sequences, where their blocks lie, and how to run and to check a step of them."""

    shape: Shape
    sequences: list[Sequence]
    metadata: StepMetadata

    def run(self, backend: AttentionBackend, options: AttentionOptions) -> torch.Tensor:
        """Return the backend's output for the step, [num_tokens, num_heads, value_dim]."""
        paged = PagedAttention([self.pool_with_past()], backend)
        paged.begin(self.metadata, None)
        return paged.run_layer(0, self._new_rows("query"), self._new_rows("keys"), self._new_rows("values"), options)

    def expected(self, options: AttentionOptions) -> torch.Tensor:
        """Return the oracle's output for it, in float32."""
        return torch.cat([dense(sequence, options) for sequence in self.sequences])

    def pool_with_past(self) -> LayerPool:
        """Write the KV of earlier steps, and NaN everywhere else, so that reading a foreign slot shows."""
        shape, size = self.shape, self.metadata.block_size
        num_slots = (1 + max(block for one in self.metadata.sequences for block in one.block_ids)) * size
        dims = (shape.key_dim, shape.value_dim)
        keys, values = (
            torch.full((num_slots, shape.num_kv_heads, dim), float("nan"), dtype=shape.pool_dtype) for dim in dims
        )
        for sequence, part in zip(self.sequences, self.metadata.sequences, strict=True):
            slots = [part.block_ids[token // size] * size + token % size for token in range(part.start)]
            keys[slots] = sequence.keys[:, : part.start].transpose(0, 1).to(shape.pool_dtype)
            values[slots] = sequence.values[:, : part.start].transpose(0, 1).to(shape.pool_dtype)
        return LayerPool(keys, values)

    def _new_rows(self, name: str) -> torch.Tensor:
        new = torch.cat([getattr(sequence, name)[:, sequence.start :] for sequence in self.sequences], dim=1)
        return new.transpose(0, 1).contiguous().transpose(0, 1).to(self.shape.dtype)  # as a projection leaves it


def make_case(parts: list[tuple[int, int]], shape: Shape, *, contiguous: bool = False, seed: int = 1) -> Case:
    """Return a step of `parts`, (start, count) of each sequence; its numbers follow the seed and place in the list."""
    sequences = [
        random_sequence(start, count, shape, seed=100 * seed + place) for place, (start, count) in enumerate(parts)
    ]
    return case_of(sequences, shape, contiguous=contiguous)


def case_of(sequences: list[Sequence], shape: Shape, *, contiguous: bool = False) -> Case:
    """Return a step of these sequences over shuffled blocks, more than they need."""
    lengths = [sequence.keys.shape[1] for sequence in sequences]
    free = list(range(8 + sum(-(-length // shape.block_size) for length in lengths)))
    if not contiguous:
        random.Random(4).shuffle(free)
    parts = []
    for sequence, length in zip(sequences, lengths, strict=True):
        needed = -(-length // shape.block_size)
        parts.append(BatchSequence(sequence.start, length - sequence.start, tuple(free[:needed])))
        free = free[needed:]
    tokens = (0,) * sum(part.count for part in parts)
    return Case(shape, sequences, build(StepBatch(tokens, tuple(parts), ()), block_size=shape.block_size, device=_CPU))


def random_sequence(start: int, count: int, shape: Shape, *, seed: int) -> Sequence:
    """Return a sequence whose numbers the shape's dtypes hold exactly."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.bfloat16 if torch.bfloat16 in (shape.dtype, shape.pool_dtype) else torch.float32
    sizes = (
        (shape.num_heads, shape.key_dim),
        (shape.num_kv_heads, shape.key_dim),
        (shape.num_kv_heads, shape.value_dim),
    )
    query, keys, values = (
        torch.randn(heads, start + count, dim, generator=generator).to(coarse).float() for heads, dim in sizes
    )
    return Sequence(start, query, keys, values)


def dense(sequence: Sequence, options: AttentionOptions) -> torch.Tensor:
    """Return textbook attention of the new tokens: [count, num_heads, value_dim]."""
    group = sequence.query.shape[0] // sequence.keys.shape[0]
    keys, values = (kv.double().repeat_interleave(group, dim=0) for kv in (sequence.keys, sequence.values))
    scores = sequence.query[:, sequence.start :].double() @ keys.transpose(1, 2) * options.scaling
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    position, key = torch.arange(sequence.start, keys.shape[1])[:, None], torch.arange(keys.shape[1])[None]
    hidden = key > position
    if options.sliding_window is not None:
        hidden |= key <= position - options.sliding_window
    weights = scores.masked_fill(hidden, float("-inf")).exp()  # [num_heads, count, kv_length]
    total = weights.sum(-1, keepdim=True)
    if options.sinks is not None:
        total += options.sinks.double().exp()[:, None, None]
    return (weights / total @ values).transpose(0, 1).float()
