"""The tokens of one prompt are emitted in order, each once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.ordering import OrderedOutput, OrderedScores
from wire.errors import InternalError
from wire.types import FinishReason, PromptLogprobs, TokenLogprobs, TokenOutput


def token(index: int, sequence: int = 0, finish: FinishReason | None = None) -> TokenOutput:
    return TokenOutput("p", sequence, index, 100 + index, finish)


def indices(tokens: list[TokenOutput]) -> list[int]:
    return [t.index for t in tokens]


def test_early_tokens_are_held_until_the_gap_closes() -> None:
    output = OrderedOutput(1)

    assert output.add(token(1)) == []
    assert not output.started
    assert indices(output.add(token(0))) == [0, 1]
    assert output.started


def test_repeats_are_dropped() -> None:
    output = OrderedOutput(1)
    output.add(token(0))

    assert output.add(token(0)) == []
    output.add(token(2))
    assert output.add(token(2)) == []
    assert indices(output.add(token(1))) == [1, 2]


def test_nothing_is_emitted_after_the_finish() -> None:
    output = OrderedOutput(1)
    output.add(token(0, finish=FinishReason.STOP))

    assert output.add(token(1)) == []
    assert not output.open
    assert output.all_finished


def test_a_stopped_sequence_is_ended_but_not_finished() -> None:
    output = OrderedOutput(2)
    output.add(token(0))
    output.add(token(0, sequence=1, finish=FinishReason.LENGTH))

    for sequence in (0, 0, 1):
        output.stop(sequence)

    assert output.stopped == {0}
    assert output.add(token(1)) == []
    assert not output.open
    assert not output.all_finished


def test_tokens_of_unknown_sequences_are_dropped() -> None:
    assert OrderedOutput(1).add(token(0, sequence=1)) == []


@given(st.permutations([(s, i) for s in range(2) for i in range(6)]), st.lists(st.integers(0, 11), max_size=8))
def test_any_order_with_any_repeats_gives_the_same_answer(order: list[tuple[int, int]], repeats: list[int]) -> None:
    output, left = OrderedOutput(2), [[], []]  # type: tuple[OrderedOutput, list[list[int]]]
    for place in repeats:
        order = [*order[:place], order[place], *order[place:]]

    for sequence, index in order:
        finish = FinishReason.LENGTH if index == 5 else None
        for ready in output.add(token(index, sequence, finish)):
            left[ready.sequence].append(ready.index)

    assert left == [list(range(6)), list(range(6))]
    assert output.all_finished


def test_the_next_attempt_gets_emitted_tokens_and_not_held_ones() -> None:
    output = OrderedOutput(2)
    assert not output.so_far

    for early in (token(0), token(2), token(1, sequence=1)):
        output.add(early)
    output.forget_early()

    assert output.so_far == ((100,), ())
    output.add(token(1))
    assert [len(ids) for ids in output.so_far] == [2, 0]


def part_scores(start: int, end: int) -> PromptLogprobs:
    return PromptLogprobs("p", start, tuple(TokenLogprobs(-float(i), i) if i else None for i in range(start, end)))


def test_scores_are_emitted_once_and_in_order_despite_repeats() -> None:
    scores = OrderedScores()

    left = [scores.add(part_scores(*part)) for part in ((0, 4), (0, 4), (2, 6), (6, 7), (0, 7), (7, 9))]

    assert left == [part_scores(0, 4), None, part_scores(4, 6), part_scores(6, 7), None, part_scores(7, 9)]


def test_scores_that_leave_a_gap_are_an_internal_error_with_a_message() -> None:
    scores = OrderedScores()
    scores.add(part_scores(0, 3))

    with pytest.raises(InternalError, match="prompt token 5 arrived before those of 3"):
        scores.add(part_scores(5, 6))
