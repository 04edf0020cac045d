"""Log probabilities and ranks against transformers' log_softmax in plain arithmetic, row by row."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling import logprobs
from engine.sampling.logprobs import Wanted, rows_at_once, token_logprobs
from tests.examples import examples


def _logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


@examples(40)
@given(
    vocab_size=st.sampled_from([3, 40, 1000]),
    seed=st.integers(0, 999),
    tops=st.lists(st.sampled_from([0, 1, 2, 5, 2000]), min_size=1, max_size=6),
)
def test_they_are_the_log_softmax_in_plain_arithmetic(vocab_size: int, seed: int, tops: list[int]) -> None:
    logits = _logits(len(tops), vocab_size, seed)
    token_ids = [(seed + i) % vocab_size for i in range(len(tops))]

    reported = token_logprobs(logits, token_ids, tops)

    for row, token_id, top, one in zip(logits.tolist(), token_ids, tops, reported, strict=True):
        total = math.log(math.fsum(map(math.exp, row)))
        best = sorted(range(vocab_size), key=lambda token: -row[token])[:top]
        assert one.logprob == pytest.approx(row[token_id] - total, abs=1e-5)
        assert one.rank == 1 + sum(value > row[token_id] for value in row)
        assert list(one.top_ids) == best
        assert list(one.top_logprobs) == pytest.approx([row[token] - total for token in best], abs=1e-5)


def test_each_row_has_the_tokens_that_it_lists() -> None:
    logits = _logits(5, 40)
    wanted: list[Wanted] = [(3, 7), 2, (), (9, 9), (1,)]

    reported = token_logprobs(logits, [0] * 5, wanted)

    assert [one.top_ids for one in reported] == [(3, 7), reported[1].top_ids, (), (9, 9), (1,)]
    for row, one in zip(logits.log_softmax(-1).tolist(), reported, strict=True):
        assert list(one.top_logprobs) == pytest.approx([row[token] for token in one.top_ids], abs=1e-6)
    for row, one in enumerate(reported):
        assert token_logprobs(logits[row : row + 1], [0], [wanted[row]]) == [one]


def test_slices_give_the_same_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, token_ids, tops = _logits(11, 50), list(range(11)), [i % 3 for i in range(11)]
    whole = token_logprobs(logits, token_ids, tops)

    monkeypatch.setattr(logprobs, "SLICE_BYTES", 4 * 4 * 50)

    assert rows_at_once(50) == 4
    assert token_logprobs(logits, token_ids, tops) == whole


def test_equal_logits_give_equal_logprobs_beside_any_rows() -> None:
    logits = torch.zeros(2, 300).bfloat16()
    logits[:, 100:] = 1.0

    (alone,) = token_logprobs(logits[:1], [3], [4])
    among, _ = token_logprobs(logits, [3, 5], [4, 90])

    assert among == alone
    assert alone.rank == 201


@pytest.mark.parametrize("wanted", [0, 4, (40, 2)])
def test_several_tokens_of_a_row_equal_those_of_its_copies(wanted: Wanted) -> None:
    logits, token_ids = _logits(2, 60), [*range(9), *range(20, 29)]
    copies = token_logprobs(logits.repeat_interleave(9, dim=0), token_ids, [wanted] * 18)

    assert token_logprobs(logits, [token_ids[:9], token_ids[9:]], [wanted] * 2) == copies


def test_a_slice_has_at_least_one_row() -> None:
    assert rows_at_once(10**9) == 1


def test_listed_tokens_are_the_log_softmaxs_beside_any_rows() -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(5))
    expected = logits.log_softmax(dim=-1)

    reported = token_logprobs(logits, [3, 5, 7], [(40, 2), 1, (40, 2)])

    assert [one.top_ids for one in reported] == [(40, 2), (int(logits[1].argmax()),), (40, 2)]
    for row in (0, 2):
        assert list(reported[row].top_logprobs) == expected[row, [40, 2]].tolist()
    assert token_logprobs(logits[2:], [7], [(40, 2)]) == reported[2:]
