"""The first difference between two ways of serving."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.verify_compare import Divergence, all_divergences, first_divergence
from pdserve.verify_endpoints import compare, positions
from scheduler.workers.proof import Position, largest_gap

Outputs = st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=4)


@given(Outputs)
def test_equal_outputs_do_not_diverge(outputs: list[list[int]]) -> None:
    assert first_divergence(outputs, [list(one) for one in outputs]) is None


def test_the_first_different_prompt_is_named_with_both_tokens() -> None:
    divergence = first_divergence([[1, 2], [3, 4], [5]], [[1, 2], [3, 9], [6]])

    assert divergence == Divergence(prompt=1, position=1, reference=4, found=9)
    assert str(divergence) == "prompt 1, token 1: 9 instead of 4"


def test_an_output_that_ends_early_diverges_there() -> None:
    assert str(first_divergence([[1, 2]], [[1]])) == "prompt 0, token 1: nothing instead of 2"


def test_every_prompt_has_one_divergence_at_most() -> None:
    assert [one.prompt for one in all_divergences([[1, 1], [2], [3]], [[0, 0], [2], [4]])] == [0, 2]


_ONE = {"tokens": ["a", "b"], "token_logprobs": [-0.5, -1.0], "top_logprobs": [{"a": -0.5, "c": -0.75}, {"b": -1.0}]}


@pytest.mark.parametrize(
    ("changes", "divergence", "is_close"),
    [
        ({}, None, True),
        ({"token_logprobs": [-0.5, -1.125]}, None, True),
        ({"token_logprobs": [-0.5, -2.0], "top_logprobs": [{}, {}]}, None, False),
        ({"tokens": ["c", "b"], "token_logprobs": [-0.625, -1.0]}, "token 0: 'c' (-0.625) instead of 'a' (-0.5)", True),
        (
            {"tokens": ["c", "b"], "token_logprobs": [-9.0, -1.0], "top_logprobs": [{}, {}]},
            "token 0: 'c' (-9) instead of 'a' (-0.5)", False,
        ),
        (
            {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5}]},
            "token 1: nothing instead of 'b' (-1)", False,
        ),
        # each lists a token that the other lacks: the same text may be written differently there
        ({"top_logprobs": [{"a": -0.5, "d": -3.0}, {"b": -1.0}]}, None, True),
    ],
)  # fmt: skip
def test_two_endpoints_are_compared_up_to_their_first_difference(
    changes: dict[str, Any], divergence: str | None, is_close: bool
) -> None:
    found = compare(positions(_ONE), positions(_ONE | changes))
    assert (found.divergence, found.is_close) == (divergence, is_close)


@pytest.mark.parametrize(
    ("token", "top", "gap"),
    [
        (7, {7: -0.5, 8: -0.75, 9: -2.0}, 0.0),
        (7, {7: -0.5, 8: -0.75, 6: -2.125}, 0.125),  # 9 is no likelier than -2.125, 6 than -2.0
        (8, {8: -0.5, 7: -0.75, 9: -2.0}, 0.25),
        (5, {5: -0.5, 6: -1.0, 9: -2.0}, 1.5),  # 9 is as likely, but 7 is at most -2.0
        (5, {}, math.inf),
    ],
)
def test_a_token_only_one_lists_is_no_likelier_than_the_others_last(
    token: int, top: dict[int, float], gap: float
) -> None:
    one, other = Position(7, -0.5, {7: -0.5, 8: -0.75, 9: -2.0}), Position(token, -0.5, top)
    assert largest_gap(one, other) == largest_gap(other, one) == gap
