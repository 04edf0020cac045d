"""A step copies between host and device equally often for few and many sequences or layers, and never waits."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.loader import load_model
from engine.step import BatchSequence, PoolingRows, SampleRow, ScoreRow, StepBatch
from engine.torch_model import TorchModel
from tests.devices.card import CopyCounts, count_copies
from tests.devices.every_device import open_device
from tests.engine.tiny_families import make_family
from tests.engine.tiny_models import VOCAB_SIZE
from wire.types import SamplingParams

KINDS = {
    "llama": {},
    "gemma2": {},  # sliding windows and softcaps
    "gpt_oss": {},  # sinks and experts
    "phi3": {
        "sliding_window": None, "original_max_position_embeddings": 16,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16,
            "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
        },
    },  # a rope that depends on lengths
}  # fmt: skip
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"seed": 3},
    "filtered": {"seed": 3, "top_k": 9, "top_p": 0.8, "min_p": 0.01},
    "penalties": {"seed": 3, "repetition_penalty": 1.3, "presence_penalty": 0.2, "logit_bias": ((5, 1.0),)},
    "allowed tokens": {"seed": 3, "allowed_token_ids": tuple(range(4, 40))},
    "logprobs": {"seed": 3, "logprobs": 3},
}


def load(folder: Path, kind: str = "llama", attention: str = "card", **settings: Any) -> TorchModel:
    path, device = make_family(kind, folder, **{**KINDS[kind], **settings}), open_device(attention)
    return load_model(
        path, dtype="bfloat16", block_size=128, kv_cache_memory=32 << 20, num_threads=1, device=device
    ).model  # fmt: skip


def step_of(num_decoding: int, num_prompts: int, params: dict[str, Any]) -> StepBatch:
    """Return a step of sequences 20 tokens and more in, and of prompts of 30 tokens."""
    numbers, sequences, samples, rows = random.Random(2), [], [], 0
    sizes = [(20 + i, 1) for i in range(num_decoding)] + [(0, 30)] * num_prompts
    for i, (start, count) in enumerate(sizes):
        sequences.append(BatchSequence(start, count, tuple(range(4 * i, 4 * i + 4)), start or count))
        rows += count
        history = [numbers.randrange(VOCAB_SIZE) for _ in range(start + count)]
        given = SamplingParams(max_tokens=9, **params)
        samples.append(SampleRow(rows - 1, given, 0, 0, history=history, prompt_length=len(history)))
    tokens = tuple(numbers.randrange(VOCAB_SIZE) for _ in range(rows))
    return StepBatch(tokens, tuple(sequences), tuple(samples))


def copies_of_step(model: TorchModel, batch: StepBatch) -> CopyCounts:
    model.launch(batch).collect()  # creates what is kept for all steps
    with count_copies() as copies:
        model.launch(batch).collect()
    return copies


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchModel]:
    """For tests that count a step's copies once the same step has run."""
    model = load(tmp_path_factory.mktemp("llama"))
    yield model
    model.close()


@pytest.mark.often("filtered", "logprobs")
@pytest.mark.parametrize("params", PARAMS)
def test_more_sequences_need_no_more_copies(params: str, llama: TorchModel) -> None:
    one, many = (copies_of_step(llama, step_of(size, size - 1, PARAMS[params])) for size in (1, 5))

    assert many == one
    assert one.reads == one.waited_uploads == {}
    assert set(one.downloads) == {"engine/transfers.py:take"}


def test_logprobs_vectors_and_beams_need_no_synchronisation(tmp_path: Path) -> None:
    model, plain = load(tmp_path), step_of(2, 2, PARAMS["logprobs"])
    searching = (*plain.samples[:3], replace(plain.samples[3], candidates=6))
    scores = tuple(ScoreRow(row, 5, row % 3) for row in range(2, 31))
    batch = replace(plain, samples=searching, scores=scores, pooling_rows=(PoolingRows(2, 30), PoolingRows(32, 1)))

    with count_copies() as copies:
        output = model.launch(batch).collect()

    assert copies.reads == copies.waited_uploads == {}
    assert (len(output.scores), len(output.pooled), output.score_failure) == (29, 2, None)
    assert output.candidates[3] is not None
    model.close()


def test_collecting_a_step_copies_nothing(tmp_path: Path) -> None:
    model = load(tmp_path)
    pending = model.launch(step_of(3, 2, PARAMS["logprobs"]))

    with count_copies() as copies:
        output = pending.collect()

    assert copies == CopyCounts()
    assert len(output.token_ids) == len(output.logprobs) == 5
    model.close()


def test_a_step_starts_from_tokens_the_host_has_not_read(tmp_path: Path) -> None:
    model, first = load(tmp_path), step_of(3, 0, PARAMS["greedy"])
    second = step_of(3, 0, PARAMS["greedy"])
    second_ahead = replace(second, token_ids=(0, 0, 0), carried=((0, 2), (2, 1)))

    with count_copies() as copies:
        pending = model.launch(first)
        ahead = model.launch(second_ahead)
    tokens = pending.collect().token_ids
    ahead_tokens = ahead.collect().token_ids

    assert copies.reads == copies.waited_uploads == {}
    known = replace(second, token_ids=(tokens[2], 0, tokens[1]))
    model.launch(first).collect()
    assert ahead_tokens == model.launch(known).collect().token_ids
    model.close()


@pytest.mark.often("card-llama", "card-cuda-llama", "card-npu-llama")
@pytest.mark.parametrize(
    ("attention", "kind"),
    [
        pytest.param(attention, kind, marks=[pytest.mark.long] * (kind != "llama" or attention == "card-cuda"))
        for attention in ("card", "card-cuda", "card-npu")
        for kind in KINDS
    ],
)
def test_more_layers_need_no_more_copies(kind: str, attention: str, tmp_path: Path) -> None:
    batch = step_of(4, 2, PARAMS["greedy"])
    copies = []
    for num_layers in (2, 4):
        layers = {"layer_types": ["sliding_attention", "full_attention"] * (num_layers // 2)}
        settings = {"num_hidden_layers": num_layers, **(layers if kind in ("gemma2", "gpt_oss") else {})}
        model = load(tmp_path / str(num_layers), kind, attention, **settings)
        copies.append(copies_of_step(model, batch))
        model.close()

    assert copies[0] == copies[1]
    assert copies[0].reads == copies[0].waited_uploads == {}
