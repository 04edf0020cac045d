"""Choose how many tokens of which sequence the next step computes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from wire.step_cost import StepCost


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits on one step: its sequences, its tokens in total, and the tokens of prompt chunks among them."""

    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk_size: int

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "prefill_chunk_size"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


SLOW_STEP_S = 2.0
"""Longest step for prompts' chunks: a longer one delays the prompts behind it."""
_LEAST_CHUNK, _LEAST_SLICE = 64, 16
"""The smallest chunk in tokens, alone and beside sequences with short gap limits: a prompt must advance at any cost."""
_GROWTH = 4
"""Beside sequences with short gap limits, a chunk is at most this many times the longest one that was measured."""
_MORE_GAP = 1.1
"""Where the decoding alone takes longer than the gap limit, a chunk may make the step this many times as long."""


@dataclass(frozen=True, slots=True)
class Streams:
    """The `num` sequences being decoded, which a step must not delay by more than `gap_limit_s` between two tokens.

    `gap_limit_s` is the shortest of their limits.
    With `awaits_more`, others may arrive during the step: their next token waits for this step and the next one.
    """

    num: int
    gap_limit_s: float
    awaits_more: bool = False


def paced(largest: BatchLimits, cost: StepCost, streams: Streams, longest_chunk: int = 0) -> BatchLimits:
    """Return the limits of a step beside `streams`, with chunks as large as `cost` allows.

    A step should take at most the gap limit (half of it with `awaits_more`) or, if the decoding alone takes about that
    long, a tenth more than the decoding. `longest_chunk` is the longest chunk for which `cost` was measured: the cost
    of a much longer one is not known.
    """
    limit_s, least, most = SLOW_STEP_S, _LEAST_CHUNK, largest.prefill_chunk_size
    if streams.num or streams.awaits_more:
        step_limit_s = streams.gap_limit_s / 2 if streams.awaits_more else streams.gap_limit_s
        limit_s = min(limit_s, max(step_limit_s, _MORE_GAP * cost.decode_s(streams.num)))
        if streams.gap_limit_s < SLOW_STEP_S:
            least = _LEAST_SLICE // 2 if streams.awaits_more else _LEAST_SLICE
            most = min(most, max(least, _GROWTH * longest_chunk))
    size = min(most, cost.chunk_within(limit_s, streams.num, least))
    return largest if size == largest.prefill_chunk_size else replace(largest, prefill_chunk_size=int(size))


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
