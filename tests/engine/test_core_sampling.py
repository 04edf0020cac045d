"""A seeded request gives the same tokens in any batch, wherever it runs and however often it is interrupted."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.core import EngineCore
from engine.interface import Chunk
from engine.loader import load_model
from engine.torch_model import TorchModel
from tests.engine.fake_engines import Answers, run
from tests.engine.test_core_handoff import hand_over
from tests.engine.tiny_models import VOCAB_SIZE, make_tiny_model
from wire.types import PromptState, SamplingParams

_NUM_TOKENS = 10
_MIXES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.8},
    {"temperature": 1.4, "repetition_penalty": 0.8, "frequency_penalty": -0.5, "top_p": 0.9},
    {"top_k": 20, "min_p": 0.01, "logit_bias": ((9, 6.0), (12, -50.0))},
    {"allowed_token_ids": tuple(range(40, 90)), "presence_penalty": 2.0},
    {"bad_words": ((50,), (51, 52), (60, 61, 62)), "temperature": 1.5},
    {"stop_token_ids": tuple(range(3, 200)), "min_tokens": 6, "temperature": 2.0},
    {"n": 3, "temperature": 1.2, "repetition_penalty": 1.2},
    {"n": 1, "best_of": 3, "temperature": 1.3, "logprobs": 0},
]

TokensBySequence = dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture
def models(checkpoint: Path) -> Iterator["Models"]:
    """Return `make(...)`, whose models are closed afterwards."""
    made = Models(checkpoint)
    yield made
    made.close()


class Models:
    """Makes engines over the tiny model, and closes them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._made: list[TorchModel] = []

    def core(self, *, num_blocks: int = 512, prefix_caching: bool = False) -> tuple[EngineCore, TorchModel]:
        model = load_model(
            self._path, dtype="float32", block_size=16, kv_cache_memory=num_blocks * 8192, num_threads=1
        ).model
        self._made.append(model)
        core = EngineCore(
            model, max_num_seqs=128, max_num_batched_tokens=512, prefill_chunk_size=48, prefix_caching=prefix_caching
        )
        return core, model

    def close(self) -> None:
        for model in self._made:
            model.close()


def states(count: int, max_tokens: int = _NUM_TOKENS) -> list[PromptState]:
    """Prompts of all mixes of parameters, each with a seed of its own."""
    numbers = random.Random(8)
    made = []
    for i in range(count):
        params = SamplingParams(**{"max_tokens": max_tokens, "seed": 1000 + i, **_MIXES[i % len(_MIXES)]})
        ids = tuple(numbers.randrange(3, VOCAB_SIZE - 20) for _ in range(numbers.randint(1, 40)))
        made.append(PromptState(f"p{i}", f"r{i}", ids, params))
    return made


def generate(core: EngineCore, prompts: Sequence[PromptState]) -> TokensBySequence:
    for state in prompts:
        core.add(state)
    answers = run(core)
    assert answers.failed == []
    return answers.tokens


def starting_with(tokens: TokensBySequence) -> Answers:
    return Answers(tokens={key: list(ids) for key, ids in tokens.items()})


def generate_alone(core: EngineCore, prompts: Sequence[PromptState]) -> TokensBySequence:
    return {key: tokens for state in prompts for key, tokens in generate(core, [state]).items()}


def test_alone_and_in_a_batch_of_64_the_tokens_are_the_same(models: Models) -> None:
    core, _ = models.core()
    prompts = states(64)

    assert generate(core, prompts) == generate_alone(core, prompts)


def test_after_preemption_the_tokens_are_the_same(models: Models) -> None:
    large, _ = models.core()
    tight, _ = models.core(num_blocks=20)
    prompts = states(27, max_tokens=48)

    assert generate(tight, prompts) == generate_alone(large, prompts)
    assert tight.load().preemptions > 0


def test_across_a_hand_off_the_tokens_are_the_same(models: Models) -> None:
    p, p_model = models.core()
    d, d_model = models.core()
    reference, _ = models.core()

    for state in states(18):
        chunks: list[Chunk] = []
        p.add(state, hold=True)
        first = None
        while first is None:
            result = p.step(lambda layer, now: chunks.extend(now) if layer == 1 else None)  # noqa: B023
            first = next(iter(result.prefilled), None)
        reported = {(state.prompt_id, i): list(output) for i, output in enumerate(first.state.outputs)}
        if not first.finished:
            d.admit(first.state, hand_over(state, p_model, chunks, d, d_model))
            p.release(state.prompt_id)
            for key, more in run(d, starting_with(reported)).tokens.items():
                reported[key] = more

        assert reported == generate(reference, [state])


@pytest.mark.parametrize("given", [1, 4, 9])
def test_resumed_from_some_of_its_tokens_the_rest_are_the_same(models: Models, given: int) -> None:
    core, _ = models.core()
    prompts = states(18)
    whole = generate_alone(core, prompts)

    for state in prompts:
        outputs = tuple(tuple(whole[state.prompt_id, i][:given]) for i in range(state.params.num_sequences))
        if any(len(whole[state.prompt_id, i]) > given for i in range(state.params.num_sequences)):
            core.add(replace(state, outputs=outputs))
            reported = run(core, starting_with({(state.prompt_id, i): list(o) for i, o in enumerate(outputs)})).tokens
            assert reported == {key: tokens for key, tokens in whole.items() if key[0] == state.prompt_id}


def test_a_cached_prefix_changes_no_token(models: Models) -> None:
    core, _ = models.core(prefix_caching=True)
    plain, _ = models.core()
    prompts = states(18)
    generate(core, [replace(state, prompt_id=f"before-{state.prompt_id}") for state in prompts])

    assert generate(core, prompts) == generate_alone(plain, prompts)
