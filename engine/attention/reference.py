"""Attention in plain torch, sequence by sequence, on any device: the truth that other backends are tested against."""

from dataclasses import dataclass

import torch

from engine.attention.interface import AttentionOptions
from engine.step import BatchSequence
from engine.step_metadata import StepMetadata


class ReferenceAttention:
    """The reference backend. Scores and softmax are float32 whatever the pool's dtype."""

    def plan(self, metadata: StepMetadata) -> "ReferenceStep":
        """Nothing is shared between layers."""
        return ReferenceStep(metadata)


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """One step: each sequence's keys are gathered through its block table and attended alone."""

    metadata: StepMetadata

    def write(self, keys: torch.Tensor, values: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor) -> None:
        """See StepAttention.write."""
        write_rows(keys, new_keys, self.metadata.slots)
        write_rows(values, new_values, self.metadata.slots)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See StepAttention.attend."""
        outputs = []
        for rows, sequence in self.metadata.rows():
            slots = slots_of(sequence, self.metadata.block_size, keys.device)
            outputs.append(_attend(sequence, query[:, rows], keys[slots], values[slots], options))
        return torch.cat(outputs)


def write_rows(pool: torch.Tensor, new: torch.Tensor, slots: torch.Tensor) -> None:
    """Copy `new` [heads, num_tokens, dim] to `slots` [num_tokens] of the pool [num_slots, heads, dim]."""
    pool.index_copy_(0, slots, new.transpose(0, 1).to(pool.dtype))


def slots_of(sequence: BatchSequence, block_size: int, device: torch.device) -> torch.Tensor:
    """Return the pool slots of all the sequence's tokens, in order: [kv_length] int64."""
    blocks = torch.tensor(sequence.block_ids, dtype=torch.int64, device=device)
    offsets = torch.arange(block_size, device=device)
    return (blocks[:, None] * block_size + offsets).flatten()[: sequence.kv_length]


def visible(sequence: BatchSequence, first_key: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return [count, kv_length - first_key] bool: which keys from `first_key` on each of the step's queries sees."""
    queries = torch.arange(sequence.start, sequence.kv_length, device=device)[:, None]
    keys = torch.arange(first_key, sequence.kv_length, device=device)[None, :]
    causal = keys <= queries
    return causal if window is None else causal & (keys > queries - window)


def _attend(
    sequence: BatchSequence, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Return [count, num_heads, value_dim]. query: [num_heads, count, dim]; keys, values: [kv_length, heads, dim]."""
    group = query.shape[0] // keys.shape[1]
    keys_by_head = keys.float().transpose(0, 1).repeat_interleave(group, dim=0)  # [num_heads, kv_length, dim]
    values_by_head = values.float().transpose(0, 1).repeat_interleave(group, dim=0)
    scores = query.float() @ keys_by_head.transpose(1, 2) * options.scaling  # [num_heads, count, kv_length]
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    mask = visible(sequence, 0, options.sliding_window, query.device)
    scores = scores.masked_fill(~mask, float("-inf"))
    weights = _softmax(scores, options.sinks)
    return (weights @ values_by_head).to(query.dtype).transpose(0, 1)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    if sinks is None:
        return scores.softmax(dim=-1)
    column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
