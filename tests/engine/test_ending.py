"""Endings: stop ids, min_tokens, max_tokens, the model's length."""

import pytest

from engine.ending import banned_tokens, finish_of, repeats
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


def test_a_prompts_tokens_are_no_part_of_a_repetition() -> None:
    rule = RepetitionDetection(2, 1, 2)

    assert not repeats([7, 7, 7], 1, rule)
    assert repeats([5, 7, 7], 2, rule)


def test_a_sequence_as_long_as_the_model_ends_by_length() -> None:
    params = SamplingParams(max_tokens=50)

    assert finish_of([1, 2], params, prompt_length=5, max_model_len=8) is None
    assert finish_of([1, 2, 3], params, prompt_length=5, max_model_len=8) == LENGTH


def test_stop_ids_are_banned_exactly_until_min_tokens() -> None:
    params = SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=(3, 4))

    assert [banned_tokens(params, position) for position in range(4)] == [(3, 4), (3, 4), (), ()]
