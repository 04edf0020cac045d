"""The sampler against transformers' logits warpers, against its own probabilities, and a row alone against a batch."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from engine.sampling import sampler
from engine.sampling.sampler import TorchChooser, kept_weights
from engine.step import SampleRow
from tests.engine import both_choosers
from tests.examples import examples
from wire.types import SamplingParams

_PARAMS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1.7, "top_k": 5},
    {"temperature": 1.0, "top_k": 10_000},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 5.0, "top_p": 0.999},
    {"temperature": 1.0, "top_p": 0.0001},
    {"temperature": 1.3, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.7, "min_p": 0.02},
]


def _row(
    index: int = 0, *, sequence: int = 0, position: int = 0, banned: tuple[int, ...] = (), **params: Any
) -> SampleRow:
    return SampleRow(index, SamplingParams(max_tokens=1, **params), sequence, position, banned)


def sample(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    return both_choosers.sample(logits, rows).token_ids


def _logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def _expected(logits: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
    scores = TemperatureLogitsWarper(params["temperature"])(None, logits)
    if "top_k" in params:
        scores = TopKLogitsWarper(params["top_k"])(None, scores)
    if "top_p" in params:
        scores = TopPLogitsWarper(params["top_p"])(None, scores)
    if "min_p" in params:
        scores = MinPLogitsWarper(params["min_p"])(None, scores)
    return scores.softmax(dim=-1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("params", _PARAMS)
@pytest.mark.parametrize("vocab_size", [50, 3001])
def test_kept_set_and_probabilities_are_those_of_transformers(params: dict[str, Any], vocab_size: int) -> None:
    logits = _logits(4, vocab_size)

    weights = kept_weights(logits, [_row(i, **params) for i in range(4)])

    expected = _expected(logits, params)
    assert torch.equal(weights > 0, expected > 0)
    torch.testing.assert_close(weights / weights.sum(dim=-1, keepdim=True), expected, rtol=1e-4, atol=1e-7)


def test_nucleus_larger_than_the_first_guess_is_sorted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_NUCLEUS_GUESS", 4)
    logits = _logits(3, 200)

    weights = kept_weights(logits, [_row(i, temperature=4.0, top_p=0.95) for i in range(3)])

    assert torch.equal(weights > 0, _expected(logits, {"temperature": 4.0, "top_p": 0.95}) > 0)


@pytest.mark.often("params1")
@pytest.mark.parametrize(
    "params", [{"temperature": 1.0}, {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.05}]
)
def test_frequencies_follow_the_probabilities(params: dict[str, Any]) -> None:
    logits, draws = _logits(1, 12, seed=3), 4000
    expected = _expected(logits, params)[0]

    counts = Counter(sample(logits, [_row(position=i, seed=9, **params)])[0] for i in range(draws))

    chi_square = sum(
        (counts[token] - draws * p) ** 2 / (draws * p) for token, p in enumerate(expected.tolist()) if p > 0
    )
    assert all(expected[token] > 0 for token in counts)
    assert chi_square < 40  # 11 degrees of freedom: one in 30,000 by chance; the draws are fixed by the seed


@examples(60)
@given(
    vocab_size=st.sampled_from([7, 33, 129, 1000, 4099]),
    seed=st.integers(0, 2**32),
    choices=st.lists(st.sampled_from([{"temperature": 0.0}, *_PARAMS]), min_size=2, max_size=6),
)
def test_a_row_alone_is_the_same_as_in_a_batch(vocab_size: int, seed: int, choices: list[dict[str, Any]]) -> None:
    logits = _logits(len(choices), vocab_size, seed % 1000)
    rows = [_row(i, position=i, seed=seed, **params) for i, params in enumerate(choices)]

    together = sample(logits, rows)

    assert together == [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]


@examples(40)
@given(vocab_size=st.sampled_from([7, 33, 1000, 4099]), seed=st.integers(0, 999), params=st.sampled_from(_PARAMS))
def test_weights_do_not_depend_on_neighbours(vocab_size: int, seed: int, params: dict[str, Any]) -> None:
    logits = _logits(5, vocab_size, seed)
    rows = [_row(i, **params) for i in range(5)]

    together = kept_weights(logits, rows).cumsum(dim=-1)

    for i in range(5):
        assert torch.equal(together[i], kept_weights(logits[i : i + 1], rows[i : i + 1]).cumsum(dim=-1)[0])


def test_temperature_zero_is_greedy() -> None:
    logits = _logits(3, 100)

    assert sample(logits, [_row(i, temperature=0.0) for i in range(3)]) == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_banned_tokens_are_never_chosen(temperature: float) -> None:
    logits = _logits(1, 100)
    order = logits[0].argsort(descending=True).tolist()

    chosen = sample(logits, [_row(temperature=temperature, banned=(order[0], order[1], 10_000))])

    assert chosen == [order[2]]


def test_the_largest_draw_stays_inside_the_kept_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "uniforms", lambda seeds, *_: np.full(len(seeds), 1.0 - 2**-24))
    logits = torch.full((1, 64), -200.0)
    logits[0, :5] = 1.0

    assert sampler.sample(logits, [_row(temperature=1.0)], TorchChooser()).token_ids == [4]


def test_the_lowest_temperature_is_greedy() -> None:
    logits = _logits(1, 100)

    assert sample(logits, [_row(temperature=1e-45)]) == [int(logits.argmax())]


def test_a_row_of_nan_stays_in_the_vocabulary_and_harms_no_neighbour() -> None:
    logits = _logits(2, 100)
    alone = sample(logits[1:], [_row(1, seed=4, top_p=0.9)])
    logits[0] = float("nan")

    first, second = sample(logits, [_row(0, seed=4, top_p=0.9), _row(1, seed=4, top_p=0.9)])

    assert 0 <= first < 100
    assert [second] == alone


def test_infinite_logits_can_be_the_best_and_cannot_be_drawn_from() -> None:
    logits = _logits(3, 100)
    logits[:2, 7] = float("inf")

    sampled = both_choosers.sample(logits, [_row(0, temperature=0.0), _row(1, banned=(99,)), _row(2)])

    assert sampled.token_ids[0] == 7
    assert [(row, str(why)) for row, why in sampled.failures] == [
        (1, "the model's logits of output token 0 are infinite")
    ]


def test_another_sequence_or_position_draws_another_number() -> None:
    logits = torch.zeros(1, 10_000)

    tokens = {sample(logits, [_row(sequence=s, position=p, seed=5)])[0] for s in range(4) for p in range(4)}

    assert len(tokens) == 16


def test_logits_are_left_as_they_were() -> None:
    logits = _logits(2, 50)
    before = logits.clone()

    sample(logits, [_row(0, temperature=0.5, banned=(1,)), _row(1, temperature=1.0, top_k=3)])

    assert torch.equal(logits, before)


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, 50), []) == []
