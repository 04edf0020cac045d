"""Choose how many tokens of which sequence the next step computes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What one step may hold: sequences, tokens in all, and tokens of prompt chunks among them."""

    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk_size: int

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "prefill_chunk_size"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


def plan_step(remaining: Sequence[int], limits: BatchLimits) -> list[int]:
    """Return how many tokens each sequence gets; `remaining` are their uncomputed tokens, oldest sequence first.

    Those with one token left (decodes) come first, all before any chunk; chunks are served in order of age, each as
    large as the limits allow.
    """
    counts = [0] * len(remaining)
    seats, tokens, chunk_tokens = limits.max_num_seqs, limits.max_num_batched_tokens, limits.prefill_chunk_size
    for i, left in enumerate(remaining):
        if left == 1 and seats and tokens:
            counts[i] = 1
            seats, tokens = seats - 1, tokens - 1
    for i, left in enumerate(remaining):
        if left > 1 and seats and (count := min(left, tokens, chunk_tokens)):
            counts[i] = count
            seats, tokens, chunk_tokens = seats - 1, tokens - count, chunk_tokens - count
    return counts
