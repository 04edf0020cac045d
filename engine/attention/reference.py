"""Attention in plain torch, sequence by sequence, on any device: the oracle of the other backends' tests."""

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import torch

from engine.attention.interface import AttentionOptions
from engine.step import BatchSequence
from engine.step_metadata import StepMetadata
from engine.transfers import upload


class ReferenceAttention:
    """The reference backend. Scores and softmax are float32 whatever the pool's dtype."""

    def plan(self, metadata: StepMetadata) -> "ReferenceStep":
        """Return the step; its first layer computes what all layers share."""
        return ReferenceStep(metadata)


class SlotWriter:
    """Implements StepAttention.write for the torch backends: one row to one slot."""

    def __init__(self, metadata: StepMetadata) -> None:
        self.metadata = metadata

    def write(self, keys: torch.Tensor, values: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor) -> None:
        """See StepAttention.write."""
        write_rows(keys, new_keys, self.metadata.slots)
        write_rows(values, new_values, self.metadata.slots)


class ReferenceStep(SlotWriter):
    """One step: each sequence's keys are gathered through its block table and attended alone.

    All block tables are uploaded once, in one tensor; no layer waits for the device or uploads anything.
    """

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See StepAttention.attend."""
        outputs = []
        for (rows, sequence), slots in zip(self.metadata.rows(), self._slots, strict=True):
            first_key = 0 if options.sliding_window is None else max(0, sequence.start - options.sliding_window + 1)
            seen = slots[first_key:]
            outputs.append(_attend(sequence, first_key, query[:, rows], keys[seen], values[seen], options))
        return torch.cat(outputs)

    @cached_property
    def _slots(self) -> list[torch.Tensor]:
        """For each sequence, the pool slots of all its tokens in order: [kv_length] int64."""
        device, size = self.metadata.slots.device, self.metadata.block_size
        blocks = upload(torch.from_numpy(np.array(self.metadata.packed.blocks, np.int64)), device)  # of all sequences
        slots = (blocks[:, None] * size + torch.arange(size, device=device)).flatten()
        return [slots[start : start + length] for start, length in self._places(size)]

    def _places(self, block_size: int) -> Iterator[tuple[int, int]]:
        """Yield (first, count) of each sequence's slots within the slots of all blocks."""
        packed, first = self.metadata.packed, 0
        for end, length in zip(packed.table_ends, packed.kv_lengths, strict=True):
            yield first * block_size, length
            first = end


def write_rows(pool: torch.Tensor, new: torch.Tensor, slots: torch.Tensor) -> None:
    """Copy `new` [heads, num_tokens, dim] to `slots` [num_tokens] of the pool [num_slots, heads, dim]."""
    pool.index_copy_(0, slots, new.transpose(0, 1).to(pool.dtype))


def slots_of(sequence: BatchSequence, block_size: int, device: torch.device) -> torch.Tensor:
    """Return the pool slots of all the sequence's tokens, in order: [kv_length] int64."""
    blocks = torch.tensor(sequence.block_ids, dtype=torch.int64, device=device)
    offsets = torch.arange(block_size, device=device)
    return (blocks[:, None] * block_size + offsets).flatten()[: sequence.kv_length]


def visible(sequence: BatchSequence, first_key: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return [count, kv_length - first_key] bool: the keys from `first_key` on that each query of the step sees."""
    queries = torch.arange(sequence.start, sequence.kv_length, device=device)[:, None]
    keys = torch.arange(first_key, sequence.kv_length, device=device)[None, :]
    causal = keys <= queries
    for first, end in sequence.spans:
        causal = causal | ((first <= queries) & (queries < end) & (first <= keys) & (keys < end))
    return causal if window is None else causal & (keys > queries - window)


def _attend(
    sequence: BatchSequence, first_key: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:  # fmt: skip
    """Return [count, num_heads, value_dim]. query: [num_heads, count, dim]; keys, values: [length, kv_heads, dim].

    The heads of a group are treated as more queries of their KV head. `length` counts from `first_key`.
    """
    num_heads, count, _ = query.shape
    length, kv_heads, _ = keys.shape
    grouped = query.float().reshape(kv_heads, -1, query.shape[2])  # [kv_heads, group * count, dim]
    scores = (grouped @ keys.float().permute(1, 2, 0) * options.scaling).view(num_heads, count, length)
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if count > 1:  # a single query sees all keys inside its window
        mask = visible(sequence, first_key, options.sliding_window, query.device)
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = _softmax(scores, options.sinks).view(kv_heads, -1, length)
    outputs = weights @ values.float().transpose(0, 1)  # [kv_heads, group * count, value_dim]
    return outputs.view(num_heads, count, -1).to(query.dtype).transpose(0, 1)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the weights of keys, [num_heads, count, length]; a sink adds to the softmax's sum."""
    if sinks is None:
        return scores.softmax(dim=-1)
    column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1].contiguous()
