"""The whole engine on torch: EngineCore over TorchModel equals plain transformers, token for token."""

import random
from pathlib import Path

import pytest

from engine.core import EngineCore
from engine.loader import load_model
from engine.oracle import Oracle
from tests.engine.fake_engines import run
from tests.engine.tiny_models import DISTINCT_KINDS, VOCAB_SIZE, make_tiny_model
from wire.types import PromptState, SamplingParams

_NUM_TOKENS = 20


def _core(path: Path, *, kv_bytes: int) -> EngineCore:
    model = load_model(path, dtype="float32", block_size=16, kv_cache_memory=kv_bytes, num_threads=1).model
    return EngineCore(model, max_num_seqs=8, max_num_batched_tokens=64, prefill_chunk_size=24)


def _prompts() -> list[tuple[int, ...]]:
    numbers = random.Random(5)
    return [tuple(numbers.randrange(3, VOCAB_SIZE - 20) for _ in range(n)) for n in (3, 16, 40, 61, 90, 7)]


@pytest.mark.often("qwen3-full-pool", "mistral-sliding-room-for-all")
@pytest.mark.parametrize("kv_bytes", [4 << 20, 320 << 10], ids=["room-for-all", "full-pool"])
@pytest.mark.parametrize("kind", DISTINCT_KINDS)
def test_continuous_batching_equals_transformers(kind: str, kv_bytes: int, tmp_path: Path) -> None:
    path = make_tiny_model(kind, tmp_path)
    core = _core(path, kv_bytes=kv_bytes * (2 if kind == "opt" else 1))
    params = SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0)
    for number, prompt in enumerate(_prompts()):
        core.add(PromptState(f"p{number}", f"r{number}", prompt, params))

    answers = run(core)

    expected = Oracle(path, "float32").generate_greedy(_prompts(), _NUM_TOKENS, ignore_eos=True)
    assert [answers.tokens[f"p{number}", 0] for number in range(len(expected))] == expected
    assert answers.failed == []


def test_sequences_of_one_prompt_share_it_and_differ(tmp_path: Path) -> None:
    core = _core(make_tiny_model("llama", tmp_path), kv_bytes=4 << 20)
    params = SamplingParams(max_tokens=_NUM_TOKENS, temperature=1.0, seed=3, n=3)
    core.add(PromptState("p", "r", _prompts()[2], params))

    together = run(core).tokens

    core.add(PromptState("p", "r", _prompts()[2], params))
    core.add(PromptState("other", "r2", _prompts()[3], SamplingParams(max_tokens=_NUM_TOKENS, temperature=1.0, seed=9)))
    again = run(core).tokens
    assert len({tuple(tokens) for tokens in together.values()}) == 3
    assert {key: again[key] for key in together} == together
