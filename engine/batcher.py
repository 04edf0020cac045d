"""Choose how many tokens of which sequence the next step computes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of one step: sequences, tokens in total, and tokens of prompt chunks among them."""

    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk_size: int

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "prefill_chunk_size"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


SLOW_STEP_S = 2.0
"""A longer step delays the other sequences, so the next one gets fewer prompt tokens."""
_MIN_CHUNK = 64


def paced(limits: BatchLimits, largest: BatchLimits, step_s: float) -> BatchLimits:
    """Return the limits after a step of `step_s` seconds: half the chunk size after a slow step, but at least 64
    tokens; twice the size after a fast one, up to that of `largest`.
    """
    size, maximum = limits.prefill_chunk_size, largest.prefill_chunk_size
    if step_s > SLOW_STEP_S:
        size = max(size // 2, min(_MIN_CHUNK, maximum))
    elif step_s < SLOW_STEP_S / 4:
        size = min(2 * size, maximum)
    return limits if size == limits.prefill_chunk_size else replace(limits, prefill_chunk_size=size)


def plan_step(remaining: Sequence[int], limits: BatchLimits) -> list[int]:
    """Return how many tokens each sequence gets; `remaining` are their uncomputed tokens, oldest sequence first.

    Sequences with one token left (decodes) are served before any chunk; chunks are served oldest first, each as large
    as the limits allow.
    """
    counts = [0] * len(remaining)
    free_seqs, tokens, chunk_tokens = limits.max_num_seqs, limits.max_num_batched_tokens, limits.prefill_chunk_size
    for i, left in enumerate(remaining):
        if left == 1 and free_seqs and tokens:
            counts[i] = 1
            free_seqs, tokens = free_seqs - 1, tokens - 1
    for i, left in enumerate(remaining):
        if left > 1 and free_seqs and (count := min(left, tokens, chunk_tokens)):
            counts[i] = count
            free_seqs, tokens, chunk_tokens = free_seqs - 1, tokens - count, chunk_tokens - count
    return counts
