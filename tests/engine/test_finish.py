"""Finish reasons: stop ids, min_tokens, max_tokens, the model's length."""

from collections.abc import Sequence
from typing import overload

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.finish import banned_tokens, finish_of, repeats
from wire.types import FinishReason, RepetitionDetection, SamplingParams

STOP = FinishReason.STOP, 9
LENGTH = FinishReason.LENGTH, None
REPETITION = FinishReason.REPETITION, None


@pytest.mark.parametrize(
    ("outputs", "params", "expected"),
    [
        ([], SamplingParams(max_tokens=1), None),
        ([1, 2], SamplingParams(max_tokens=3), None),
        ([1, 2, 3], SamplingParams(max_tokens=3), LENGTH),
        ([1, 9], SamplingParams(max_tokens=3, stop_token_ids=(8, 9)), STOP),
        ([9, 1], SamplingParams(max_tokens=3, stop_token_ids=(9,)), None),
        ([1, 2, 9], SamplingParams(max_tokens=3, stop_token_ids=(9,)), STOP),
        ([9], SamplingParams(max_tokens=3, min_tokens=2, stop_token_ids=(9,)), None),
        ([1, 9], SamplingParams(max_tokens=3, min_tokens=2, stop_token_ids=(9,)), STOP),
        ([5, 1, 2, 1, 2], SamplingParams(max_tokens=9, repetition_detection=RepetitionDetection(2, 1, 2)), REPETITION),
        ([5, 1, 2, 1, 2], SamplingParams(max_tokens=9, repetition_detection=RepetitionDetection(2, 1, 3)), None),
        ([5, 1, 2, 1, 2], SamplingParams(max_tokens=9, repetition_detection=RepetitionDetection(1, 1, 2)), None),
        ([1, 2, 1, 2, 1], SamplingParams(max_tokens=9, repetition_detection=RepetitionDetection(4, 1, 2)), REPETITION),
        ([7, 7, 7], SamplingParams(max_tokens=9, repetition_detection=RepetitionDetection(4, 1, 3)), REPETITION),
        ([7, 7, 7], SamplingParams(max_tokens=9, repetition_detection=RepetitionDetection(4, 2, 2)), None),
        ([7, 7], SamplingParams(max_tokens=9, min_tokens=3, repetition_detection=RepetitionDetection(4, 1, 2)), None),
        ([7, 7], SamplingParams(max_tokens=2, repetition_detection=RepetitionDetection(4, 1, 2)), LENGTH),
        (
            [9, 9],
            SamplingParams(max_tokens=2, stop_token_ids=(9,), repetition_detection=RepetitionDetection(4, 1, 2)),
            STOP,
        ),
        ([7], SamplingParams(max_tokens=9, repetition_detection=RepetitionDetection(1024, 1, 2)), None),
    ],
)
def test_the_last_token_decides(
    outputs: list[int], params: SamplingParams, expected: tuple[FinishReason, int | None] | None
) -> None:
    assert finish_of(outputs, params, prompt_length=5, max_model_len=100) == expected


def test_prompt_tokens_do_not_count_as_repetition() -> None:
    rule = RepetitionDetection(2, 1, 2)

    assert not repeats([7, 7, 7], 1, rule)
    assert repeats([5, 7, 7], 2, rule)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_repetition_is_found_in_linear_time(count: int) -> None:
    nearly = [7] * (count * 64 - 1)
    tokens = _CountedReads([*nearly, 9, *nearly])  # no pattern is there often enough, and each one nearly is

    assert not repeats(tokens, len(tokens), RepetitionDetection(1024, 64, count))
    assert tokens.num_reads < 4 * len(tokens)


@given(st.lists(st.integers(0, 1), min_size=1, max_size=40), st.integers(1, 9), st.integers(1, 9), st.integers(2, 4))
def test_repetition_follows_its_definition(tokens: list[int], one: int, other: int, count: int) -> None:
    minimum, maximum = min(one, other), max(one, other)
    found = any(
        tokens[-size * count :] == tokens[-size:] * count
        for size in range(minimum, maximum + 1)
        if size * count <= len(tokens)
    )

    assert repeats(tokens, len(tokens), RepetitionDetection(maximum, minimum, count)) == found


class _CountedReads(Sequence[int]):
    """A list that counts how many of its items are read."""

    def __init__(self, items: list[int]) -> None:
        self._items = items
        self.num_reads = 0

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        found = self._items[index]
        self.num_reads += len(found) if isinstance(found, list) else 1
        return found


def test_a_sequence_as_long_as_the_model_finishes_by_length() -> None:
    params = SamplingParams(max_tokens=50)

    assert finish_of([1, 2], params, prompt_length=5, max_model_len=8) is None
    assert finish_of([1, 2, 3], params, prompt_length=5, max_model_len=8) == LENGTH


def test_stop_ids_are_banned_exactly_until_min_tokens() -> None:
    params = SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=(3, 4))

    assert [banned_tokens(params, position) for position in range(4)] == [(3, 4), (3, 4), (), ()]
