"""Tokens of one prompt leave in order, each once."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.ordering import OrderedOutput
from wire.types import FinishReason, TokenOutput


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


def test_nothing_leaves_after_the_finish() -> None:
    output = OrderedOutput(1)
    output.add(token(0, finish=FinishReason.STOP))

    assert output.add(token(1)) == []
    assert output.all_ended
    assert output.all_finished


def test_a_stopped_sequence_is_ended_but_not_finished() -> None:
    output = OrderedOutput(2)
    output.add(token(0))
    output.add(token(0, sequence=1, finish=FinishReason.LENGTH))

    assert output.stop(0)
    assert not output.stop(0)
    assert not output.stop(1)
    assert output.add(token(1)) == []
    assert output.all_ended
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


def test_what_left_is_told_to_the_next_attempt_and_what_is_held_is_dropped() -> None:
    output = OrderedOutput(2)
    assert not output.so_far

    for early in (token(0), token(2), token(1, sequence=1)):
        output.add(early)
    output.forget_early()

    assert output.so_far == ((100,), ())
    assert not output.past_first
    output.add(token(1))
    assert output.past_first
    assert len(output.so_far[0]) == 2
