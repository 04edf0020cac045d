"""What a step's logits become: tokens, logprobs by the raw logits, candidates by the processed ones."""

from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from engine.step import SampleRow, ScoreRow, StepBatch
from engine.step_output import make_output
from wire.errors import InternalError, InvalidRequest
from wire.types import SamplingParams


def _row(index: int = 0, *, candidates: int = 0, history: tuple[int, ...] = (1, 2), **params: Any) -> SampleRow:
    given = SamplingParams(**{"max_tokens": 9, "temperature": 0.0, **params})
    return SampleRow(index, given, 0, 0, (), history, 1, candidates=candidates)


def _logits(num_rows: int, vocab_size: int = 30, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def test_without_requests_for_logprobs_none_are_computed() -> None:
    output = make_output(_logits(2), StepBatch((), (), (_row(), _row())))

    assert (output.logprobs, output.candidates, output.scores, output.failures) == ((), (), [], ())


def test_logprobs_are_of_the_raw_logits_whatever_shapes_them() -> None:
    logits = _logits(3)
    rows = (_row(logprobs=2, logit_bias=((7, 100.0),)), _row(), _row(logprobs=0, temperature=2.0))

    output = make_output(logits, StepBatch((), (), rows))

    first, second, third = output.logprobs
    expected = logits.log_softmax(dim=-1)
    assert output.token_ids[0] == 7
    assert second is None
    assert first is not None
    assert third is not None
    assert first.logprob == pytest.approx(float(expected[0, 7]), abs=1e-6)
    assert first.top_ids == tuple(logits[0].topk(2).indices.tolist())
    assert first.rank == 1 + int((logits[0] > logits[0, 7]).sum())
    assert third.logprob == pytest.approx(float(expected[2, output.token_ids[2]]), abs=1e-6)
    assert third.top_ids == ()


def test_candidates_are_ranked_as_transformers_beam_search_does() -> None:
    logits = _logits(3)
    rows = (_row(), _row(candidates=6, repetition_penalty=1.4, history=(4, 9)), _row(candidates=4, logprobs=2))
    ranked = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([[4, 9]]), logits[1:2].log_softmax(dim=-1))

    output = make_output(logits, StepBatch((), (), rows))

    first, second, third = output.candidates
    assert first is None
    assert second is not None
    assert third is not None
    assert second.token_ids == tuple(ranked[0].topk(6).indices.tolist())
    assert second.scores == pytest.approx(tuple(ranked[0].topk(6).values.tolist()), abs=1e-6)
    assert third.token_ids == tuple(logits[2].topk(4).indices.tolist())
    assert (second.described, output.logprobs) == ((), ())
    assert [one.logprob for one in third.described] == pytest.approx(third.scores, abs=1e-6)
    assert [(one.rank, one.top_ids) for one in third.described] == [(i + 1, third.token_ids[:2]) for i in range(4)]
    assert output.token_ids == [int(logits[0].argmax()), second.token_ids[0], third.token_ids[0]]


def test_banned_candidates_are_left_out_and_none_left_is_an_error() -> None:
    rows = (_row(candidates=4, allowed_token_ids=(3, 5)), _row(candidates=4, allowed_token_ids=(3,)))
    banned = SampleRow(1, rows[1].params, 0, 0, (3,), candidates=4)

    output = make_output(_logits(2), StepBatch((), (), (rows[0], banned)))

    first, second = output.candidates
    assert first is not None
    assert second is not None
    assert set(first.token_ids) == {3, 5}
    assert second.token_ids == ()
    ((index, error),) = output.failures
    assert index == 1
    assert isinstance(error, InvalidRequest)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_logits_of_a_search_fail_only_that_search(value: float) -> None:
    logits, rows = _logits(3), (_row(candidates=4), _row(candidates=4, allowed_token_ids=(3, 5)), _row(candidates=4))
    logits[1, 3] = logits[2, 7] = value

    output = make_output(logits, StepBatch((), (), rows))

    assert [(row, type(why)) for row, why in output.failures] == [(1, InternalError), (2, InternalError)]
    assert str(output.failures[1][1]) == "the model's logits of output token 0 are not numbers"
    first = output.candidates[0]
    assert first is not None
    assert first.token_ids == tuple(logits[0].topk(4).indices.tolist())


def test_scored_rows_come_in_slices_of_any_size() -> None:
    logits = _logits(5)
    scores = tuple(ScoreRow(row, 2 * row, row) for row in range(5))

    reported = make_output(torch.empty(0, 30), StepBatch((), (), (), scores), iter([logits[:3], logits[3:]])).scores

    for row, one in enumerate(reported):
        assert one.logprob == pytest.approx(float(logits[row].log_softmax(dim=-1)[2 * row]), abs=1e-6)
        assert len(one.top_ids) == row
