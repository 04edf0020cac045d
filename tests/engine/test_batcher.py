"""Batcher: decodes first, chunks in order of age, every limit kept."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.batcher import BatchLimits, Streams, paced, plan_step
from wire.step_cost import StepCost


def test_decodes_come_before_older_chunks() -> None:
    assert plan_step([10, 1, 1], BatchLimits(8, 4, 100)) == [2, 1, 1]


def test_the_oldest_chunk_is_served_first() -> None:
    assert plan_step([6, 6, 6], BatchLimits(8, 100, 8)) == [6, 2, 0]


def test_chunk_size_bounds_prompts_and_not_decodes() -> None:
    assert plan_step([1, 1, 1, 50], BatchLimits(8, 100, 2)) == [1, 1, 1, 2]


def test_running_sequences_stay_within_max_num_seqs() -> None:
    assert plan_step([5, 1, 1, 1], BatchLimits(2, 100, 100)) == [0, 1, 1, 0]


def test_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match="prefill_chunk_size must be positive, not 0"):
        BatchLimits(1, 1, 0)


@given(
    remaining=st.lists(st.integers(1, 40), max_size=12),
    limits=st.builds(BatchLimits, st.integers(1, 8), st.integers(1, 60), st.integers(1, 30)),
)
def test_a_plan_keeps_every_limit_and_wastes_none(remaining: list[int], limits: BatchLimits) -> None:
    counts = plan_step(remaining, limits)
    chunk_tokens = sum(count for count, left in zip(counts, remaining, strict=True) if left > 1)

    assert all(0 <= count <= left for count, left in zip(counts, remaining, strict=True))
    assert sum(count > 0 for count in counts) <= limits.max_num_seqs
    assert sum(counts) <= limits.max_num_batched_tokens
    assert chunk_tokens <= limits.prefill_chunk_size
    assert not remaining or sum(counts) > 0


_COST = StepCost(base_s=0.01, sequence_s=0.001, token_s=0.0005)
_CHEAP = replace(_COST, token_s=1e-6)
_NONE = StepCost()


@pytest.mark.parametrize(
    ("cost", "num_decoding", "gap_limit_s", "size"),
    [
        (_NONE, 0, 0.1, 512),  # not measured yet: the largest
        (_NONE, 8, math.inf, 512),
        (_COST, 0, 0.1, 512),  # no stream that could wait
        (_COST, 1, 0.1, 178),  # (100 - 11 ms) / 0.5 ms
        (_COST, 40, 0.1, 100),
        (_COST, 90, 0.1, 20),  # decoding takes 100 ms itself: a tenth more
        (_COST, 10, 0.02, 16),
        (_COST, 10, math.inf, 512),
        (StepCost(0.015, 0.001, 0.01), 0, 0.1, 198),  # at most 2 s
        (StepCost(0.01, 0.001, 0.1), 0, 0.1, 64),
        (StepCost(0.01, 0.001, 0.1), 1, math.inf, 64),
    ],
)  # fmt: skip
def test_a_chunk_is_as_large_as_its_cost_beside_the_streams_allows(
    cost: StepCost, num_decoding: int, gap_limit_s: float, size: int
) -> None:
    largest = BatchLimits(8, 2048, 512)

    assert paced(largest, cost, Streams(num_decoding, gap_limit_s), 512) == replace(largest, prefill_chunk_size=size)


@pytest.mark.parametrize(
    ("cost", "num_decoding", "gap_limit_s", "longest_chunk", "size"),
    [
        (_NONE, 8, 0.1, 0, 16),  # the first chunk beside streams
        (_CHEAP, 8, 0.1, 16, 64),
        (_CHEAP, 8, 0.1, 64, 256),
        (_CHEAP, 8, 0.1, 256, 512),
        (_COST, 8, 0.1, 64, 164),  # its cost allows less
        (_CHEAP, 0, 0.1, 16, 512),  # no stream that could wait
        (_CHEAP, 8, math.inf, 16, 512),
    ],
)
def test_chunks_beside_streams_grow_as_longer_ones_are_measured(
    cost: StepCost, num_decoding: int, gap_limit_s: float, longest_chunk: int, size: int
) -> None:
    largest = BatchLimits(8, 2048, 512)

    streams = Streams(num_decoding, gap_limit_s)

    assert paced(largest, cost, streams, longest_chunk) == replace(largest, prefill_chunk_size=size)


@pytest.mark.parametrize(
    ("num_decoding", "gap_limit_s", "size"),
    [
        (0, 0.1, 80),  # half of the limit: the hand-off waits for the end of this step, and for the next one
        (8, 0.1, 64),
        (40, 0.1, 10),
        (90, 0.1, 20),
        (8, math.inf, 512),
    ],
)
def test_chunks_are_shorter_while_a_hand_off_is_on_its_way(num_decoding: int, gap_limit_s: float, size: int) -> None:
    largest = BatchLimits(8, 2048, 512)
    streams = Streams(num_decoding, gap_limit_s, awaits_more=True)

    assert paced(largest, _COST, streams, 512) == replace(largest, prefill_chunk_size=size)


def test_a_chunk_below_the_minimum_is_kept() -> None:
    largest = BatchLimits(8, 2048, 8)

    assert paced(largest, StepCost(9.0, 9.0, 9.0), Streams(4, 0.1)) is largest
