"""The engine one step ahead over torch, on a device whose results come late: tokens are those of transformers."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core import EngineCore
from engine.loader import load_model
from engine.oracle import Oracle
from engine.step import BatchSequence, SampleRow, StepBatch
from engine.torch_model import TorchModel
from tests.devices.capturing_device import CapturingDevice
from tests.devices.dying_device import DyingDevice
from tests.devices.fake_device import FakeDevice
from tests.devices.late_device import LateDevice, late_downloads
from tests.engine.fake_engines import Answers, run
from tests.engine.step_runner import GREEDY
from tests.engine.tiny_models import DISTINCT_KINDS, VOCAB_SIZE, make_tiny_model
from wire.errors import InternalError
from wire.types import BeamSearch, PromptState, SamplingParams

_NUM_TOKENS = 20
_LENGTHS = (3, 16, 40, 61, 90, 7)


@pytest.fixture(autouse=True)
def results_come_late() -> Iterator[None]:
    with late_downloads():
        yield


def load(path: Path, device: FakeDevice, *, kv_bytes: int = 4 << 20, **options: Any) -> TorchModel:
    return load_model(
        path, dtype="float32", block_size=16, kv_cache_memory=kv_bytes, num_threads=1, device=device, **options
    ).model  # fmt: skip


def core_of(model: TorchModel, *, swap_bytes: int = 0) -> EngineCore:
    return EngineCore(
        model, max_num_seqs=16, max_num_batched_tokens=64, prefill_chunk_size=24, swap_bytes=swap_bytes
    )  # fmt: skip


def prompts() -> list[tuple[int, ...]]:
    numbers = random.Random(5)
    return [tuple(numbers.randrange(3, VOCAB_SIZE - 20) for _ in range(length)) for length in _LENGTHS]


def count_carried(model: TorchModel) -> list[int]:
    """Return a list that gets each step's number of tokens that the host did not know."""
    counts, launch = list[int](), model.launch

    def counted(batch: StepBatch, layer_done: Any = None) -> Any:
        counts.append(len(batch.carried))
        return launch(batch, layer_done)

    model.launch = counted  # type: ignore[method-assign]
    return counts


@pytest.mark.often("qwen3-full-pool", "llama-room-for-all")
@pytest.mark.parametrize("kv_bytes", [4 << 20, 320 << 10], ids=["room-for-all", "full-pool"])
@pytest.mark.parametrize("kind", DISTINCT_KINDS)
def test_greedy_output_is_that_of_transformers(kind: str, kv_bytes: int, tmp_path: Path) -> None:
    path = make_tiny_model(kind, tmp_path)
    model = load(path, LateDevice(), kv_bytes=kv_bytes * (2 if kind == "opt" else 1))
    carried, core = count_carried(model), core_of(model, swap_bytes=1 << 20)
    for number, prompt in enumerate(prompts()):
        params = SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0)
        core.add(PromptState(f"p{number}", f"r{number}", prompt, params))

    answers = run(core)

    expected = Oracle(path, "float32").generate_greedy(prompts(), _NUM_TOKENS, ignore_eos=True)
    assert [answers.tokens[f"p{number}", 0] for number in range(len(expected))] == expected
    assert (core.runs_ahead, answers.failed) == (True, [])
    assert sum(carried) > 40, "most tokens were computed with before the host knew them"
    core.close()


def test_graphs_read_tokens_that_the_host_does_not_know(tmp_path: Path) -> None:
    path, device = make_tiny_model("llama", tmp_path), CapturingDevice()
    device.traits = replace(device.traits, is_asynchronous=True)
    model = load(path, device, max_graph_rows=8)
    carried, core = count_carried(model), core_of(model)
    for number, prompt in enumerate(prompts()):
        core.add(PromptState(f"p{number}", "r", prompt, SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0)))

    answers = run(core)

    expected = Oracle(path, "float32").generate_greedy(prompts(), _NUM_TOKENS, ignore_eos=True)
    assert [answers.tokens[f"p{number}", 0] for number in range(len(expected))] == expected
    assert device.replays > 10
    assert sum(carried) > 40
    core.close()


_ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.2, "top_p": 0.9, "n": 2},
    {"temperature": 0.8, "top_k": 20, "min_p": 0.01, "logit_bias": ((9, 6.0), (12, -50.0))},
    {"temperature": 1.5, "allowed_token_ids": tuple(range(40, 90)), "logprobs": 0, "prompt_logprobs": 2},
    {"temperature": 2.0, "stop_token_ids": tuple(range(3, 200)), "min_tokens": 6},
    {"temperature": 1.0, "stop_token_ids": tuple(range(3, 250, 9)), "n": 3},
]
_BOUND: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"temperature": 1.4, "presence_penalty": 1.5, "frequency_penalty": 0.8},
    {"temperature": 1.5, "bad_words": ((50,), (51, 52), (60, 61, 62))},
    {"temperature": 0.0, "n": 2, "best_of": 4, "beam_search": BeamSearch(), "stop_token_ids": (5, 9, 77)},
]


def answers_of(path: Path, device: FakeDevice, requested: list[dict[str, Any]]) -> tuple[Answers, int]:
    """Return what every prompt is answered, and how many tokens the host did not know at their launch."""
    model = load(path, device)
    carried, core = count_carried(model), core_of(model)
    for number, one in enumerate(requested):
        params = SamplingParams(max_tokens=_NUM_TOKENS, seed=number, **one)
        core.add(PromptState(f"p{number}", "r", prompts()[number % len(_LENGTHS)], params))
    answers = run(core)
    assert (answers.failed, core.blocks.num_used) == ([], 0)
    core.close()
    return answers, sum(carried)


@pytest.mark.parametrize("requested", [_ASKED, _BOUND, _ASKED + _BOUND], ids=["free", "bound", "mixed"])
def test_requests_of_every_kind_are_answered_as_one_at_a_time(requested: list[dict[str, Any]], tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path)

    (ahead, carried), (in_turn, known) = (
        answers_of(path, device, requested) for device in (LateDevice(), FakeDevice())
    )

    assert (ahead.tokens, ahead.finish) == (in_turn.tokens, in_turn.finish)
    assert known == 0
    assert (carried > 0) == (requested is not _BOUND)


def one_token(block: int, token: int, **more: Any) -> StepBatch:
    return StepBatch((token,), (BatchSequence(0, 1, (block,)),), (SampleRow(0, GREEDY, 0, 0),), **more)


def test_a_step_reads_its_carried_token_from_the_one_before(tmp_path: Path) -> None:
    model = load(make_tiny_model("llama", tmp_path), LateDevice())
    known = [model.launch(one_token(0, 17)).collect().token_ids[0]]
    known += model.launch(one_token(1, known[0])).collect().token_ids

    first = model.launch(one_token(0, 17))
    second = model.launch(one_token(1, 0, carried=((0, 0),)))

    assert [*first.collect().token_ids, *second.collect().token_ids] == known
    model.close()


def test_a_launch_that_fails_leaves_nothing_of_it_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice()
    model = load(make_tiny_model("llama", tmp_path), device)
    activated, recorded = device.activated, device.recorded

    def refuse(layer: int) -> None:
        raise ValueError("no link")

    with pytest.raises(ValueError, match="no link"):
        model.launch(one_token(0, 17), refuse)
    assert device.recorded > recorded, "what was launched is waited for"
    assert device.activated == activated + 1
    assert torch.is_inference_mode_enabled() is False
    model.close()


def test_a_failed_launch_is_waited_for_as_long_as_two_steps_may_take(tmp_path: Path) -> None:
    device = DyingDevice(traits=LateDevice().traits)
    model = load(make_tiny_model("llama", tmp_path), device, step_s=0.025)

    def refuse(layer: int) -> None:
        device.answers.clear()
        raise ValueError("no link")

    words = r"work launched by a failed step has not ended on fake:0 within 0.05 s \(ValueError: no link\)"
    with pytest.raises(InternalError, match=words):
        model.launch(one_token(0, 17), refuse)
    model.close()
