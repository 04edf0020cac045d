"""Sampling on every device: the same logits give the same tokens, failures and logprobs as on the CPU."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from devices.interface import Device
from engine.sampling.logits import change_logits
from engine.sampling.sampler import TorchChooser, sample
from engine.step import SampleRow, ScoreRow, StepBatch
from engine.step_output import make_output
from tests.devices.every_device import open_device
from tests.examples import examples
from wire.types import SamplingParams

VOCAB = 50
HISTORY = [3, 4, 4, 9, 9, 9, 30]
CHANGES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1e-5},
    {"top_k": 4},
    {"top_p": 0.4},
    {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 2.0},
    {"repetition_penalty": 1.7, "presence_penalty": 0.3, "frequency_penalty": -0.4},
    {"logit_bias": ((1, 5.0), (2, -100.0))},
    {"allowed_token_ids": (5, 6, 7)},
    {"logprobs": 5},
]


def mask_of(token_ids: set[int]) -> memoryview:
    words = np.zeros(-(-VOCAB // 32), np.uint32)
    for token in token_ids:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words.view(np.int32).data


@st.composite
def some_rows(draw: st.DrawFn) -> list[SampleRow]:
    rows = []
    for i in range(draw(st.integers(1, 6))):
        params = SamplingParams(max_tokens=9, seed=draw(st.integers(0, 99)), **draw(st.sampled_from(CHANGES)))
        banned = tuple(draw(st.sets(st.integers(0, VOCAB - 1), max_size=3)))
        mask = draw(st.none() | st.sets(st.integers(0, VOCAB - 1), max_size=9).map(mask_of))
        candidates = draw(st.sampled_from([0, 0, 0, 4]))
        rows.append(SampleRow(i, params, 0, i, banned, HISTORY, 4, mask, candidates))
    return rows


def scores_of(num_rows: int, seed: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.fixture(scope="module")
def card() -> Device:
    return open_device("card")


@examples(40)
@given(rows=some_rows(), seed=st.integers(0, 999))
def test_a_card_samples_and_reports_logprobs_like_the_cpu(card: Device, rows: list[SampleRow], seed: int) -> None:
    scores = scores_of(len(rows), seed)
    there = scores.to(card.torch_device)
    batch = StepBatch((), (), tuple(rows), tuple(ScoreRow(i, 7, i % 3) for i in range(len(rows))))

    mine, theirs = (make_output(one, batch, iter([one])) for one in (there, scores.clone()))

    assert list(mine.token_ids) == list(theirs.token_ids)
    assert [(i, str(why)) for i, why in mine.failures] == [(i, str(why)) for i, why in theirs.failures]
    assert mine.candidates == theirs.candidates
    assert mine.logprobs == theirs.logprobs
    assert mine.scores == theirs.scores
    assert torch.equal(there.cpu(), scores), "the logits were changed"


@pytest.mark.combinations(1)
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_every_device_samples_the_same_token_for_the_same_seed(device: Device, change: dict[str, Any]) -> None:
    rows = [
        SampleRow(i, SamplingParams(max_tokens=9, seed=i, **change), 0, i, (8,), HISTORY, 4) for i in range(32)
    ]  # fmt: skip
    scores = scores_of(32, 5)

    mine = sample(scores.to(device.torch_device), rows, TorchChooser())

    assert mine == sample(scores, rows, TorchChooser())


def test_bans_and_penalties_give_the_same_logits(device: Device) -> None:
    params = SamplingParams(max_tokens=9, **CHANGES[6], allowed_token_ids=tuple(range(40)))
    rows = [SampleRow(0, params, 0, 0, (1, 2), HISTORY, 4), SampleRow(1, params, 0, 0, (), HISTORY, 4, mask_of({3, 9}))]

    mine = change_logits(scores_of(2, 3).to(device.torch_device), rows).cpu()

    torch.testing.assert_close(mine, change_logits(scores_of(2, 3), rows), rtol=1e-6, atol=1e-6)


def test_rows_of_nan_fail_alone(device: Device) -> None:
    scores = scores_of(3, 1)
    scores[1, 4] = float("nan")
    rows = [SampleRow(i, SamplingParams(max_tokens=9, seed=1), 0, 0) for i in range(3)]

    mine = sample(scores.to(device.torch_device), rows, TorchChooser())

    assert [(i, str(why)) for i, why in mine.failures] == [
        (1, "the model's logits of output token 0 are not numbers")
    ]  # fmt: skip
    assert mine.token_ids[::2] == sample(scores, rows, TorchChooser()).token_ids[::2]
