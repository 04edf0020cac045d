"""Batcher: decodes first, chunks in order of age, every limit kept."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.batcher import BatchLimits, paced, plan_step


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


@pytest.mark.parametrize(
    ("size", "step_s", "then"),
    [(512, 2.1, 256), (100, 9.0, 64), (64, 9.0, 64), (64, 1.0, 64), (64, 0.4, 128), (512, 0.1, 512), (300, 0.1, 512)],
)
def test_a_slow_step_halves_the_next_chunk_and_a_quick_one_doubles_it(size: int, step_s: float, then: int) -> None:
    largest = BatchLimits(8, 2048, 512)

    assert paced(replace(largest, prefill_chunk_size=size), largest, step_s) == replace(
        largest, prefill_chunk_size=then
    )


def test_a_chunk_below_the_minimum_is_kept() -> None:
    largest = BatchLimits(8, 2048, 16)

    assert paced(largest, largest, 9.0) is largest
