"""The prefix cache and the swap area over the torch model: outputs equal those without, and transformers' own."""

import random
from pathlib import Path

import pytest

from engine.core import EngineCore
from engine.loader import load_model
from engine.oracle import Oracle
from tests.engine.fake_engines import Answers, run
from tests.engine.tiny_models import VOCAB_SIZE, make_tiny_model
from wire.types import PromptState, SamplingParams

NUM_TOKENS = 20
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
ROOM, TIGHT = 4 << 20, 136 << 10


def _core(path: Path, kv_bytes: int = ROOM, **options: object) -> EngineCore:
    model = load_model(path, dtype="float32", block_size=16, kv_cache_memory=kv_bytes, num_threads=1).model
    return EngineCore(model, max_num_seqs=8, max_num_batched_tokens=64, prefill_chunk_size=24, **options)  # type: ignore[arg-type]


def _ids(count: int, seed: int) -> tuple[int, ...]:
    numbers = random.Random(seed)
    return tuple(numbers.randrange(3, VOCAB_SIZE - 20) for _ in range(count))


def _answer(core: EngineCore, name: str, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    core.add(PromptState(name, name, token_ids, GREEDY))
    answers = run(core)
    assert answers.failed == []
    return tuple(answers.tokens[name, 0])


def _chat(core: EngineCore) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Hold a conversation of three turns; return each turn's prompt and answer."""
    turns, token_ids = [], _ids(37, 1)
    for number in range(3):
        reported = _answer(core, f"turn{number}", token_ids)
        turns.append((token_ids, reported))
        token_ids = (*token_ids, *reported, *_ids(11, 2 + number))
    return turns


@pytest.mark.parametrize("kind", ["llama", "mistral-sliding"])
def test_a_chat_with_the_cache_equals_one_without_and_transformers(kind: str, tmp_path: Path) -> None:
    path = make_tiny_model(kind, tmp_path)
    with_cache, without = _core(path), _core(path, prefix_caching=False)

    turns = _chat(with_cache)

    assert with_cache.blocks.tokens_found == 48 + 80
    assert _chat(without) == turns
    assert without.blocks.num_cached == 0
    prompts = [token_ids for token_ids, _ in turns]
    expected = Oracle(path, "float32").generate_greedy(prompts, NUM_TOKENS, ignore_eos=True)
    assert [list(reported) for _, reported in turns] == expected


@pytest.mark.parametrize("options", [{}, {"swap_bytes": 1 << 20}], ids=["rebuilt", "copied"])
def test_preempted_prompts_of_one_prefix_answer_as_with_room_for_all(options: dict[str, int], tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path)
    states = [
        PromptState(f"p{i}", "r", (*_ids(40, 1), *_ids(5 + 13 * i, 3 + i)), SamplingParams(30, seed=i, n=1 + i % 2))
        for i in range(6)
    ]
    reported: list[Answers] = []
    for core in (_core(path, prefix_caching=False), _core(path, TIGHT, **options)):
        for state in states:
            core.add(state)
        reported.append(run(core))
    large, small = reported

    assert core.load().preemptions > 0
    assert core.blocks.num_used == 0
    assert small.tokens == large.tokens
