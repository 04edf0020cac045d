"""Every family of models: batched, chunked, and handed from one engine to another, it equals plain transformers.

Tokens of all prompts, and where a step computes it the log probabilities of the prompts.
"""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from engine.core import EngineCore
from engine.interface import Chunk, Prefilled
from engine.loader import load_model
from engine.oracle import Oracle
from engine.step import Model
from tests.engine.fake_engines import Answers, run
from tests.engine.step_runner import copy_chunks
from tests.engine.tiny_families import NAMED, OTHERS, VARIANTS, make_family
from tests.engine.tiny_models import VOCAB_SIZE
from wire.types import PromptState, SamplingParams

_NUM_TOKENS = 10
_LENGTHS = (1, 19, 40, 70)  # three are longer than the window of 12
_FAMILIES = [*NAMED, *(pytest.param(name, marks=pytest.mark.long) for name in (*VARIANTS, *OTHERS))]
_POOLS = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "phi3")
"""One family of each kind: all layers alike, windows in turn, with sinks, latent, a part of the head rotated."""


class _Family(NamedTuple):
    path: Path
    expected: list[list[int]]
    prompt_logprobs: list[list[float]]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], _Family]:
    """Return a function that makes a family's model once and computes transformers' greedy tokens."""

    @cache
    def make(name: str) -> _Family:
        path = make_family(name, tmp_path_factory.mktemp("families") / name)
        oracle = Oracle(path, "float32")
        expected = oracle.generate_greedy(_prompts(), _NUM_TOKENS, ignore_eos=True)
        return _Family(path, expected, _prompt_logprobs(oracle._network))

    return make


@pytest.mark.parametrize("backend", ["cpu", pytest.param("reference", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", _FAMILIES)
def test_batched_and_chunked_it_equals_transformers(family: Callable[[str], _Family], name: str, backend: str) -> None:
    path, expected, prompt_logprobs = family(name)
    core = EngineCore(_model(path, backend), max_num_seqs=8, max_num_batched_tokens=48, prefill_chunk_size=13)
    for state in _states(prompt_logprobs=0):
        core.add(state)

    answers = run(core)

    core.close()
    assert answers.failed == []
    assert [answers.tokens[state.prompt_id, 0] for state in _states()] == expected
    for state, logprobs in zip(_states(), prompt_logprobs, strict=True):
        got = [one.logprob for one in answers.prompt_logprobs[state.prompt_id] if one is not None]
        assert got == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in _POOLS else [pytest.mark.long]) for name in (*NAMED, *VARIANTS, *OTHERS)],
)
def test_handed_off_it_equals_transformers(family: Callable[[str], _Family], name: str) -> None:
    path, expected, _ = family(name)
    p_model, d_model = _model(path, "reference"), _model(path, "cpu", block_size=32)
    p, d = (EngineCore(m, max_num_seqs=8, max_num_batched_tokens=48, prefill_chunk_size=13) for m in (p_model, d_model))
    for state in _states():
        p.add(state, hold=True)
    answers, prefilled, chunks = Answers(), list[Prefilled](), list[Chunk]()
    while p.has_work():
        result = p.step(lambda layer, now: chunks.extend(now) if layer == 0 else None)
        answers.take(result.tokens)
        prefilled.extend(result.prefilled)

    for held in prefilled:
        target = d.blocks.allocate(d_model.info.layout.num_blocks_for(len(held.state.token_ids)))
        copy_chunks(p_model, d_model, chunks, held.state.prompt_id, target)
        d.admit(held.state, target)
    run(d, answers)

    for core in (p, d):
        core.close()
    assert len(prefilled) == len(expected)
    assert [answers.tokens[state.prompt_id, 0] for state in _states()] == expected


def _model(path: Path, backend: str, *, block_size: int = 16) -> Model:
    return load_model(
        path,
        dtype="float32",
        block_size=block_size,
        kv_cache_memory=4 << 20,
        num_threads=1,
        attention_backend=backend,
    ).model


def _prompts() -> list[tuple[int, ...]]:
    numbers = random.Random(1)
    return [tuple(numbers.randrange(3, VOCAB_SIZE - 20) for _ in range(length)) for length in _LENGTHS]


@torch.inference_mode()
def _prompt_logprobs(network: Any) -> list[list[float]]:
    """Return transformers' log probability of each prompt's tokens but the first."""
    logprobs = list[list[float]]()
    for prompt in _prompts():
        after = torch.log_softmax(network(input_ids=torch.tensor([prompt]), use_cache=False).logits[0], dim=-1)
        logprobs.append([float(after[place, token]) for place, token in enumerate(prompt[1:])])
    return logprobs


def _states(*, prompt_logprobs: int | None = None) -> list[PromptState]:
    params = SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0, prompt_logprobs=prompt_logprobs)
    return [PromptState(f"p{n}", f"r{n}", prompt, params) for n, prompt in enumerate(_prompts())]
