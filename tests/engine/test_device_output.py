"""A step's output from a device equals the one computed at once, row by row, and is not read too early."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.device_output import DeviceStep
from engine.sampling.device_choice import choose
from engine.step import SampleRow, ScoreRow, StepBatch, StepOutput
from engine.step_output import make_output
from tests.devices.late_device import LateDevice, late_downloads
from wire.types import SamplingParams, TokenLogprobs

VOCAB_SIZE = 1500  # more than the nucleus is guessed at
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.8, "logprobs": 3},
    {"temperature": 1.4, "top_p": 0.9},
    {"temperature": 1e9, "top_p": 0.99},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.01, "logit_bias": ((9, 6.0), (12, -50.0))},
    {"temperature": 0.7, "allowed_token_ids": tuple(range(40, 90)), "logprobs": 0},
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 1.0, "top_k": 3, "top_p": 0.5, "min_p": 0.2, "logprobs": 5},
]


def rows_of(requests: list[dict[str, Any]], *, candidates: tuple[int, ...] = ()) -> tuple[SampleRow, ...]:
    numbers, rows = random.Random(3), []
    for i, one in enumerate(requests):
        history = [numbers.randrange(VOCAB_SIZE) for _ in range(12)]
        params = SamplingParams(max_tokens=9, seed=i, **one)
        banned = (7, history[0]) if i % 3 == 0 else ()
        rows.append(SampleRow(i, params, i % 2, 4 + i, banned, history, 8, candidates=6 if i in candidates else 0))
    return tuple(rows)


def logits_of(num_rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(4)) * 4).to(dtype)


def launch_output(logits: torch.Tensor, batch: StepBatch, pooled: list[torch.Tensor] | None = None) -> StepOutput:
    scored = torch.split(logits_of(len(batch.scores)), 2) if batch.scores else ()
    with late_downloads():
        step = DeviceStep(logits.clone(), batch, scored, pooled or [], LateDevice())
        assert step.token_ids.shape == (len(batch.samples),)
        return step.collect()


def at_once(logits: torch.Tensor, batch: StepBatch, pooled: list[torch.Tensor] | None = None) -> StepOutput:
    scored = torch.split(logits_of(len(batch.scores)), 2) if batch.scores else ()
    return make_output(logits.clone(), batch, scored, [one.tolist() for one in pooled or []])


def assert_same(one: TokenLogprobs | None, other: TokenLogprobs | None) -> None:
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert (one.rank, one.top_ids) == (other.rank, other.top_ids)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-6)
        assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chosen", [range(9), (0, 7), (3, 4, 8), (1,), ()], ids=str)
def test_tokens_and_logprobs_equal_those_computed_at_once(chosen: Any, dtype: torch.dtype) -> None:
    rows = rows_of([ASKED[i] for i in chosen])
    scores = tuple(ScoreRow(i, 11 * i, i % 3) for i in range(5))
    batch, logits = StepBatch((), (), rows, scores), logits_of(len(rows), dtype)
    pooled = [torch.tensor([1.5, 2.5], dtype=torch.float64)]

    got, expected = launch_output(logits, batch, pooled), at_once(logits, batch, pooled)

    assert got.token_ids == list(expected.token_ids)
    assert (tuple(got.failures), got.score_failure, got.pooled) == ((), None, expected.pooled)
    assert len(got.logprobs) == len(expected.logprobs)
    for mine, theirs in zip([*got.logprobs, *got.scores], [*expected.logprobs, *expected.scores], strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize("at_a_time", [1, 4, 1000])
def test_candidates_are_those_computed_at_once(at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.sampling.logprobs.SLICE_BYTES", at_a_time * 4 * VOCAB_SIZE)
    rows = rows_of(
        [{"temperature": 0.0, "logprobs": 2}, {"temperature": 0.0, "repetition_penalty": 1.3}] * 2, candidates=(1, 2)
    )
    batch, logits = StepBatch((), (), rows), logits_of(4)

    got, expected = launch_output(logits, batch), at_once(logits, batch)

    assert got.token_ids == list(expected.token_ids)
    for mine, theirs in zip(got.candidates, expected.candidates, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert mine.token_ids == theirs.token_ids
            assert mine.scores == pytest.approx(theirs.scores, abs=1e-6)
            assert len(mine.described) == len(theirs.described)
            for described in zip(mine.described, theirs.described, strict=True):
                assert_same(*described)


class _Rows(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the rows of logits whose log probabilities or best tokens are computed."""

    num_rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._log_softmax.default, torch.ops.aten.topk.default):
            self.num_rows += args[0].numel() // VOCAB_SIZE
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("run", [launch_output, at_once])
def test_candidates_share_the_log_probabilities_of_their_row(run: Callable[[torch.Tensor, StepBatch], Any]) -> None:
    counted, (row,) = [], rows_of([{"temperature": 0.0, "logprobs": 3}], candidates=(0,))
    for count in (1, 40):
        with _Rows() as seen:  # type: ignore[no-untyped-call]
            (found,) = run(logits_of(1), StepBatch((), (), (replace(row, candidates=count),))).candidates
        counted.append(seen.num_rows)
        assert len(found.described) == count

    assert counted[0] == counted[1] > 0


@pytest.mark.parametrize("candidates", [(), (1, 2), (3, 5)])
def test_rows_without_a_token_fail_with_the_same_message(candidates: tuple[int, ...]) -> None:
    rows = rows_of([{"temperature": float(i % 2)} for i in range(6)], candidates=candidates)
    logits = logits_of(6)
    logits[1:3] = float("-inf")
    logits[3, 5] = float("nan")
    logits[4, 9] = float("inf")
    logits[5, 9] = float("inf")
    batch = StepBatch((), (), rows)

    got, expected = launch_output(logits, batch), at_once(logits, batch)

    reported = [sorted((row, str(why)) for row, why in one.failures) for one in (got, expected)]
    assert reported[0] == reported[1]
    assert [row for row, _ in reported[0]] == [1, 2, 3, 5]
    assert all(0 <= token < VOCAB_SIZE for token in choose(logits, rows).token_ids.tolist()), "it may be carried on"


def test_nan_scores_fail_only_their_requests() -> None:
    def broken() -> Any:
        yield logits_of(1)
        raise RuntimeError("no head")

    batch = StepBatch((), (), rows_of([{"temperature": 0.0}]), (ScoreRow(0, 1, 0), ScoreRow(1, 1, 0)))

    got = DeviceStep(logits_of(1), batch, broken(), [], LateDevice()).collect()

    assert str(got.score_failure) == "cannot compute the prompt's log probabilities: RuntimeError: no head"
    assert (got.scores, len(got.token_ids)) == ([], 1)


class _Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what would make the host wait for a device: copies between them that are not asynchronous."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = str(func), kwargs or {}
        sources = [one for one in args if isinstance(one, torch.Tensor)]
        if "_to_copy" in name and kwargs.get("device") not in (None, sources[0].device):
            assert kwargs.get("non_blocking"), f"{name} waits for the device"
        return func(*args, **kwargs)


def test_sampling_needs_no_host_value_and_no_wait() -> None:
    logits, rows = torch.empty(9, VOCAB_SIZE, device="meta"), rows_of(ASKED)  # whose tensors have no numbers at all

    with _Waits():  # type: ignore[no-untyped-call]
        choice = choose(logits, rows)

    assert (choice.token_ids.shape, choice.token_ids.dtype) == ((9,), torch.int64)
    assert choice.token_ids.device.type == choice.best.device.type == "meta"


def test_top_p_is_the_same_if_the_best_or_all_tokens_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, rows = logits_of(9), rows_of([{"temperature": 1.0 + i, "top_p": 0.5 + i / 20} for i in range(9)])
    guessed = choose(logits, rows).token_ids.tolist()

    monkeypatch.setattr("engine.sampling.sampler._NUCLEUS_GUESS", VOCAB_SIZE)  # as on a device

    assert choose(logits, rows).token_ids.tolist() == guessed
