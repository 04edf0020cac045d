"""Vectors of decoders, chunk by chunk beside prompts that generate, equal the hidden states of transformers."""

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, MistralConfig, MistralModel

from engine.core import EngineCore
from engine.loader import load_model
from engine.oracle import Oracle
from engine.step import PendingStep, StepOutput
from tests.engine.fake_engines import CONFIG, prompt
from tests.engine.fake_engines import engine as fake_engine
from tests.engine.tiny_encoders import write_pooling
from tests.engine.tiny_models import VOCAB_SIZE, make_tiny_model
from wire.errors import InvalidRequest
from wire.types import Pooling, PromptState, SamplingParams

TEXTS = [
    tuple(random.Random(seed).randrange(3, VOCAB_SIZE - 20) for _ in range(length))
    for seed, length in enumerate((2, 16, 61, 90))
]


@contextmanager
def core_of(path: Path, **options: Any) -> Iterator[EngineCore]:
    model = load_model(path, dtype="float32", block_size=16, kv_cache_memory=2 << 20, num_threads=1).model
    core = EngineCore(model, max_num_seqs=8, max_num_batched_tokens=64, prefill_chunk_size=24, **options)
    yield core
    core.blocks.check()
    assert core.blocks.num_used == 0
    core.close()


def pooling_prompt(name: str, token_ids: tuple[int, ...], pooling: Pooling | None = None) -> PromptState:
    return PromptState(name, f"r-{name}", token_ids, SamplingParams(max_tokens=1), pooling=pooling or Pooling())


def vectors(core: EngineCore) -> tuple[dict[str, tuple[float, ...]], dict[str, int], list[int]]:
    """Return the vectors, the tokens found in the cache, and the tokens generated beside them."""
    found: dict[str, tuple[float, ...]] = {}
    cached: dict[str, int] = {}
    generated: list[int] = []
    while core.has_work():
        result = core.step()
        assert not result.failed
        found |= {one.prompt_id: one.values for one in result.pooled}
        cached |= {one.prompt_id: one.cached_tokens for one in result.pooled}
        generated += [token.token_id for token in result.tokens if token.token_id is not None]
    return found, cached, generated


@torch.inference_mode()
def states_by_hand(network: Any, token_ids: tuple[int, ...]) -> torch.Tensor:
    """Return [num_tokens, hidden_size] float64."""
    states: torch.Tensor = network(input_ids=torch.tensor([token_ids])).last_hidden_state[0].double()
    return states


def close(found: tuple[float, ...], wanted: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.combinations(1)
@pytest.mark.parametrize("how", ["last", "mean", "cls"])
@pytest.mark.parametrize("kind", ["llama", "mistral-sliding", "opt"])
def test_vectors_equal_transformers_beside_a_running_prompt(kind: str, how: str, tmp_path: Path) -> None:
    path = make_tiny_model(kind, tmp_path)
    network = AutoModelForCausalLM.from_pretrained(path).eval().get_decoder()
    with core_of(path) as core:
        core.add(PromptState("text", "r", TEXTS[1], SamplingParams(max_tokens=12, temperature=0.0)))
        for i, text in enumerate(TEXTS):
            core.add(pooling_prompt(str(i), text, Pooling(how=how, normalize=False)))
        found, _, generated = vectors(core)

    for i, text in enumerate(TEXTS):
        states = states_by_hand(network, text)
        close(found[str(i)], {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[how])
    assert generated == Oracle(path, "float32").generate_greedy([TEXTS[1]], 12, ignore_eos=True)[0]


@pytest.mark.parametrize("dimensions", [None, 5])
def test_vectors_of_tokens_are_collected_over_chunks(dimensions: int | None, tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path)
    network = AutoModelForCausalLM.from_pretrained(path).eval().get_decoder()
    with core_of(path) as core:
        for name in ("first", "again"):
            core.add(pooling_prompt(name, TEXTS[3], Pooling("token_embed", dimensions=dimensions)))
            core.add(PromptState(f"{name}-text", "r", TEXTS[1], SamplingParams(max_tokens=4, temperature=0.0)))
            found, cached, _ = vectors(core)
            states = states_by_hand(network, TEXTS[3])[:, :dimensions]
            rows = torch.nn.functional.normalize(states, dim=1)
            close(found[name], rows.flatten())
            assert cached[name] == 0


def test_too_many_vectors_of_tokens_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("engine.pooling.vectors.MAX_TOKEN_VALUES", 64 * 61)
    with core_of(make_tiny_model("llama", tmp_path)) as core:
        core.check(pooling_prompt("fits", TEXTS[2], Pooling("token_embed")))
        with pytest.raises(
            InvalidRequest, match="90 tokens with 64 values each, but the limit for token_embed is 61 tokens"
        ):
            core.add(pooling_prompt("long", TEXTS[3], Pooling("token_embed")))


def test_last_token_vectors_use_the_prefix_cache_means_do_not(tmp_path: Path) -> None:
    with core_of(make_tiny_model("llama", tmp_path)) as core:
        core.add(pooling_prompt("first", TEXTS[2]))
        first, _, _ = vectors(core)
        core.add(pooling_prompt("again", TEXTS[2]))
        core.add(pooling_prompt("mean", TEXTS[2], Pooling(how="mean")))
        again, cached, _ = vectors(core)

    assert cached == {"again": 48, "mean": 0}
    close(again["again"], torch.tensor(first["first"], dtype=torch.float64))


def test_dimensions_are_truncated_and_normalised_to_length_1(tmp_path: Path) -> None:
    with core_of(make_tiny_model("llama", tmp_path)) as core:
        core.add(pooling_prompt("whole", TEXTS[0], Pooling(normalize=False)))
        core.add(pooling_prompt("cut", TEXTS[0], Pooling(dimensions=5)))
        found, _, _ = vectors(core)

        wanted = torch.tensor(found["whole"][:5], dtype=torch.float64)
        close(found["cut"], wanted / wanted.norm())
        with pytest.raises(InvalidRequest, match="dimensions is 65, but the model's vectors have 64"):
            core.add(pooling_prompt("wide", TEXTS[0], Pooling(dimensions=65)))
        with pytest.raises(InvalidRequest, match=r"task is classify, but .* supports only embed and token_embed"):
            core.add(pooling_prompt("pair", TEXTS[0], Pooling("classify")))


def test_a_decoder_without_output_layer_only_makes_vectors(tmp_path: Path) -> None:
    torch.manual_seed(7)
    config = MistralConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, sliding_window=None, tie_word_embeddings=False,
    )  # fmt: skip
    MistralModel(config).eval().save_pretrained(tmp_path)
    write_pooling(tmp_path, "last", normalize=True)
    network = AutoModel.from_pretrained(tmp_path).eval()
    with core_of(tmp_path) as core:
        for i, text in enumerate(TEXTS):
            core.add(pooling_prompt(str(i), text))
        found, _, _ = vectors(core)

        with pytest.raises(InvalidRequest, match="has no output layer: it returns vectors, not text"):
            core.add(PromptState("text", "r", TEXTS[1], SamplingParams(max_tokens=2)))
    for i, text in enumerate(TEXTS):
        last = states_by_hand(network, text)[-1]
        close(found[str(i)], last / last.norm())


@pytest.mark.usefixtures("runs_ahead")
def test_prompts_dropped_from_a_full_pool_give_the_same_vectors() -> None:
    texts = [replace(prompt(f"p{i}", 40), pooling=Pooling(how="mean")) for i in range(3)]
    writers = [prompt(f"w{i}", 12, max_tokens=40) for i in range(3)]
    with fake_engine() as (core, _):
        for state in texts:
            core.add(state)
        wanted, _, _ = vectors(core)
    with fake_engine(config=replace(CONFIG, num_blocks=20), chunk=8) as (core, _):
        for state in (*writers, *texts):
            core.add(state)
        found, _, _ = vectors(core)
        assert core.load().preemptions > 0

    assert {name: pytest.approx(values) for name, values in wanted.items()} == found


class Spoiled:
    """A step whose first vector has a NaN."""

    def __init__(self, pending: PendingStep) -> None:
        self._pending = pending

    def collect(self) -> StepOutput:
        output = self._pending.collect()
        return replace(output, pooled=[(0.5, math.nan), *output.pooled[1:]])


@pytest.mark.usefixtures("runs_ahead")
def test_a_vector_with_nan_ends_only_its_own_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_engine() as (core, model):
        launch = model.launch
        monkeypatch.setattr(model, "launch", lambda *step: Spoiled(launch(*step)))
        for name in ("bad", "good"):
            core.add(replace(prompt(name, 9), pooling=Pooling()))

        result = core.step()

        ((name, error),) = result.failed
        assert name == "bad"
        assert "the model's result for this text has nan among its 2 values" in str(error)
        assert [one.prompt_id for one in result.pooled] == ["good"]
        assert core.blocks.num_used == 0


@pytest.mark.usefixtures("runs_ahead")
def test_a_cancelled_text_is_never_answered() -> None:
    with fake_engine(chunk=8) as (core, _):
        core.add(replace(prompt("gone", 40), pooling=Pooling()))
        core.step()

        assert [ending.finish for ending in core.cancel("gone")] == ["cancelled"]
        while core.has_work():  # which takes what was launched with it
            assert core.step().pooled == ()
        assert core.blocks.num_used == 0


@pytest.mark.usefixtures("runs_ahead")
@pytest.mark.parametrize(("params", "words"), [({"n": 3}, "n is 3"), ({"best_of": 2}, "best_of is 2")])
def test_a_vector_of_several_sequences_is_refused_with_a_reason(params: dict[str, Any], words: str) -> None:
    with fake_engine() as (core, _):
        with pytest.raises(InvalidRequest, match=f"{words}, but must be 1 with pooling"):
            core.add(replace(prompt("several", 9, **params), pooling=Pooling()))

        assert not core.has_work()
