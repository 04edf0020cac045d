"""Tokens drawn natively are those that torch draws, with every instruction set and any number of threads."""

import itertools
import math
from collections.abc import Iterator

import pytest
import torch

from engine.sampling.native_chooser import NativeChooser
from engine.sampling.sampler import TorchChooser
from engine.step import SampleRow
from tests.engine.both_choosers import chooser_of
from tests.native.built import threads_with
from wire.types import SamplingParams

pytestmark = pytest.mark.combinations(2)
_LIMITS = [
    {"top_k": k, "top_p": p, "min_p": m} for k, p, m in itertools.product((-1, 1, 7, 600), (1.0, 0.3, 0.95), (0, 0.05))
]
_TEMPERATURES = (1e-30, 0.01, 0.7, 1.0, 5.0, 1e30)


@pytest.fixture
def chooser(isa: str, num_threads: int) -> Iterator[NativeChooser]:
    with threads_with(isa, num_threads) as threads:
        yield chooser_of(threads)


def row(number: int, **params: float) -> SampleRow:
    return SampleRow(number, SamplingParams(9, seed=number * 77 - 5, **params), number % 3, number)  # type: ignore[arg-type]


def scores(num_rows: int, num_columns: int, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    """Rows with gaps of infinity between them."""
    wide = torch.full((num_rows, num_columns + 3), float("inf"))
    wide[:, :num_columns] = torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed)) * spread
    return wide[:, :num_columns]


def check(chooser: NativeChooser, of: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    all_rows = list(range(len(rows)))
    drawn = chooser.draw(of, all_rows, rows)
    assert drawn == TorchChooser().draw(of, all_rows, rows)
    return drawn


@pytest.mark.parametrize("num_columns", [1, 2, 15, 16, 511, 513, 3000])
def test_all_limits_together_equal_torchs(chooser: NativeChooser, num_columns: int) -> None:
    rows = [
        row(i, temperature=temperature, **limits)
        for i, (temperature, limits) in enumerate(itertools.product(_TEMPERATURES, _LIMITS))
    ]
    check(chooser, scores(len(rows), num_columns), rows)


@pytest.mark.parametrize("spread", [1e-3, 1.0, 8.0, 1e4])
def test_draws_from_a_whole_vocabulary_equal_torchs(chooser: NativeChooser, spread: float) -> None:
    rows = [row(i, **limits) for i, limits in enumerate(_LIMITS)]
    assert len(set(check(chooser, scores(len(rows), 49_152, spread), rows))) > 1


def test_equal_scores_are_kept_or_dropped_together(chooser: NativeChooser) -> None:
    rows = [row(i, **limits) for i, limits in enumerate(_LIMITS * 8)]
    check(chooser, scores(len(rows), 700).round(), rows)
    check(chooser, torch.zeros(len(rows), 700), rows)


@pytest.mark.parametrize(
    ("shares", "top_p"), [((7, 3, 1), 10 / 11), ((6, 7, 8, 4, 4, 5), 21 / 34), ((2, 2, 7, 6, 5), 18 / 22)]
)
def test_a_nucleus_reaching_top_p_exactly_is_not_larger(
    chooser: NativeChooser, shares: tuple[int, ...], top_p: float
) -> None:
    some = torch.tensor(shares, dtype=torch.float64).div(sum(shares)).log().float().expand(200, len(shares))
    check(chooser, some.contiguous(), [row(i, top_p=top_p) for i in range(200)])


def test_banned_tokens_are_never_drawn(chooser: NativeChooser) -> None:
    rows = [row(i, **limits) for i, limits in enumerate(_LIMITS * 4)]
    some = scores(len(rows), 900)
    some[:, torch.randperm(900, generator=torch.Generator().manual_seed(3))[:890]] = float("-inf")
    for number, token in enumerate(check(chooser, some, rows)):
        assert some[number, token] > float("-inf")


def test_the_last_token_can_be_drawn_and_none_after_it(chooser: NativeChooser) -> None:
    some = torch.full((200, 513), -1e4)
    some[:, 512] = 0.0
    rows = [row(i) for i in range(200)]
    assert check(chooser, some, rows) == [512] * 200


def test_a_total_rounded_up_never_draws_a_banned_token(chooser: NativeChooser) -> None:
    """All but the first block lie below the last bit of 1 + 2^-24: together they round it up, one by one do not."""
    some = torch.full((1, 200 * 512), float("-inf"))
    nearly = float(torch.tensor(-16.63554).double().exp().float())
    some[0, :3] = torch.tensor([0.0, -16.63554, math.log(2.0**-24 - nearly - 1e-14)])
    some[0, 515::512] = -36.85
    largest = SampleRow(0, SamplingParams(9, seed=7_298_506), 0, 0)  # whose uniform number is 1 - 2^-24
    assert check(chooser, some, [largest]) == [0]


def test_only_the_requested_rows_are_drawn_from(chooser: NativeChooser) -> None:
    some, rows = scores(9, 400), [row(i, top_p=0.9) for i in range(9)]
    assert chooser.draw(some, [2, 3, 7], rows) == [chooser.draw(some[i:], [0], [rows[i]])[0] for i in (2, 3, 7)]


def test_draws_follow_the_probabilities(chooser: NativeChooser) -> None:
    weights = torch.tensor([0.1, 0.0, 0.4, 0.2, 0.3])
    some, count = weights.log().expand(20_000, 5).contiguous(), 20_000
    rows = [SampleRow(i, SamplingParams(9, seed=11), 0, i) for i in range(count)]
    found = torch.bincount(torch.tensor(chooser.draw(some, list(range(count)), rows)), minlength=5) / count
    assert torch.allclose(found, weights, atol=4 * (0.25 / count) ** 0.5)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_an_invalid_row_gives_some_token_and_affects_no_other(chooser: NativeChooser, bad: float) -> None:
    some = scores(3, 600)
    others = chooser.draw(some, [0, 2], [row(i, top_k=5, top_p=0.9) for i in range(3)])
    some[1] = bad
    drawn = chooser.draw(some, [0, 1, 2], [row(i, top_k=5, top_p=0.9) for i in range(3)])
    assert 0 <= drawn[1] < 600
    assert [drawn[0], drawn[2]] == others
