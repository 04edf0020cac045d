"""Steps launched ahead on a card whose tensors are not the CPU's: a launch never waits, and tokens are the same."""

import random
from pathlib import Path
from typing import Any

import pytest

from engine.core import EngineCore
from engine.loader import load_model
from engine.oracle import Oracle
from engine.step import BatchSequence, SampleRow, StepBatch
from engine.torch_model import TorchModel
from tests.devices.card import CopyCounts, count_copies
from tests.devices.card_device import CardDevice
from tests.devices.fake_device import FakeDevice
from tests.engine.fake_engines import run
from tests.engine.tiny_models import VOCAB_SIZE, make_tiny_model
from wire.types import PromptState, SamplingParams

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0},
    "filtered": {"top_k": 9, "top_p": 0.8, "min_p": 0.01},
    "shaped": {"repetition_penalty": 1.3, "presence_penalty": 0.2, "logit_bias": ((5, 1.0),)},
    "banned": {"allowed_token_ids": tuple(range(4, 40))},
    "likely": {"logprobs": 3},
}


def load(path: Path, device: Any) -> TorchModel:
    return load_model(
        path, dtype="float32", block_size=16, kv_cache_memory=4 << 20, num_threads=1, device=device
    ).model  # fmt: skip


def prompts(*lengths: int) -> list[tuple[int, ...]]:
    numbers = random.Random(5)
    return [tuple(numbers.randrange(3, VOCAB_SIZE - 20) for _ in range(length)) for length in lengths]


def step_of(requested: list[dict[str, Any]]) -> StepBatch:
    """Return a step of one prompt of nine tokens for each of these parameters."""
    parts, samples, token_ids = [], [], list[int]()
    for i, one in enumerate(requested):
        history = list(prompts(9 + i)[0])[-9:]
        token_ids += history
        parts.append(BatchSequence(0, 9, (i,)))
        params = SamplingParams(max_tokens=9, seed=i, **one)
        samples.append(SampleRow(len(token_ids) - 1, params, 0, 0, history=history, prompt_length=9))
    return StepBatch(tuple(token_ids), tuple(parts), tuple(samples))


@pytest.mark.often("all", "filtered")
@pytest.mark.parametrize(
    "requested", [*([one] for one in PARAMS.values()), list(PARAMS.values())], ids=[*PARAMS, "all"]
)
def test_a_launch_reads_nothing_from_the_card(requested: list[dict[str, Any]], tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path)
    here, card = load(path, FakeDevice()), load(path, CardDevice(is_asynchronous=True))
    batch = step_of(requested)
    card.launch(batch).collect()  # creates what is kept for all steps

    with count_copies() as copies:
        step = card.launch(batch)
        assert not copies.reads, f"the host waits in {dict(copies.reads)}"
        assert copies.downloads
    with count_copies() as copies:
        got = step.collect()
        assert copies == CopyCounts(), "collecting launched something"

    expected = here.launch(batch).collect()
    assert got.token_ids == expected.token_ids
    for mine, theirs in zip(got.logprobs, expected.logprobs, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    here.close()
    card.close()


@pytest.mark.parametrize("attention", ["card", "cuda"])
def test_a_launch_behind_another_step_reads_nothing_from_the_card(attention: str, tmp_path: Path) -> None:
    model = load(make_tiny_model("llama", tmp_path), CardDevice(is_asynchronous=True, attention=attention))
    first = step_of([PARAMS["greedy"]] * 3)
    rows = tuple(SampleRow(i, one.params, 0, 1) for i, one in enumerate(first.samples))
    parts, carried = tuple(BatchSequence(9, 1, (i,)) for i in range(3)), tuple((i, i) for i in range(3))

    def run_both(tokens: tuple[int, ...], carried: tuple[tuple[int, int], ...]) -> list[int]:
        before = model.launch(first)
        second = model.launch(StepBatch(tokens, parts, rows, carried=carried))
        return [*before.collect().token_ids, *second.collect().token_ids]

    known = tuple(run_both((0, 0, 0), carried)[:3])
    with count_copies() as copies:
        got = run_both((0, 0, 0), carried)
        assert not copies.reads, f"the host waits in {dict(copies.reads)}"

    assert got == run_both(known, ()), "the tokens differ from those of a host that knew them"
    model.close()


def test_greedy_output_equals_transformers(tmp_path: Path) -> None:
    path, given = make_tiny_model("qwen3", tmp_path), prompts(3, 16, 40, 61, 7)
    model = load(path, CardDevice(is_asynchronous=True))
    core = EngineCore(model, max_num_seqs=8, max_num_batched_tokens=64, prefill_chunk_size=24, swap_bytes=1 << 20)
    for number, prompt in enumerate(given):
        core.add(PromptState(f"p{number}", "r", prompt, SamplingParams(max_tokens=12, temperature=0.0)))

    answers = run(core)

    expected = Oracle(path, "float32").generate_greedy(given, 12, ignore_eos=True)
    assert [answers.tokens[f"p{number}", 0] for number in range(len(given))] == expected
    assert (core.runs_ahead, answers.failed, core.blocks.num_used) == (True, [], 0)
    core.close()
