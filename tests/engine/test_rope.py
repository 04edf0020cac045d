"""Rope types that depend on a sequence's length: each sequence by its own, at the limit and in any batch."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.checkpoints.checkpoint import open_checkpoint
from engine.core import EngineCore
from engine.kv.blocks import BlockPool
from engine.kv_probe import rehearse
from engine.loader import load_model
from engine.oracle import Oracle
from engine.ranks.load import RanksOptions, load_ranks
from engine.rope import Frequencies
from engine.rope_lengths import RopeLengths, token_lengths
from engine.step import Model
from tests.engine.fake_engines import Answers, run
from tests.engine.tiny_families import make_family, tiny_config
from tests.engine.tiny_models import VOCAB_SIZE
from wire.errors import ConfigError, PdserveError
from wire.types import PromptState, SamplingParams

_BORDER = 32
_NUM_TOKENS = 12
_LENGTHS = (5, 27, 31, 32, 33, 50)  # below the short length of 32, up to it, across it and past it
_DYNAMIC: dict[str, Any] = {
    "max_position_embeddings": _BORDER,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}


def _longrope(half_dim: int, **more: float) -> dict[str, Any]:
    factors = {
        "short_factor": [1.0 + i / 8 for i in range(half_dim)],
        "long_factor": [4.0 + i for i in range(half_dim)],
    }
    original = {"original_max_position_embeddings": _BORDER}
    return {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **factors, **original, **more}}


_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-dynamic": ("llama", _DYNAMIC),
    "phi3-longrope": ("phi3", {**_longrope(4), "original_max_position_embeddings": _BORDER, "sliding_window": None}),
    "llama-longrope": ("llama", _longrope(8)),
    "cohere-dynamic": ("cohere", _DYNAMIC),
    "deepseek_v2-dynamic": ("deepseek_v2", _DYNAMIC),
    "minicpm3-longrope": ("minicpm3", _longrope(4)),
    "mistral-dynamic": ("mistral", _DYNAMIC),
}


@pytest.mark.often("deepseek_v2-dynamic-cpu", "phi3-longrope-cpu")
@pytest.mark.parametrize("backend", ["cpu", pytest.param("reference", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", _MODELS)
def test_sequences_around_the_limit_equal_transformers_in_one_batch(name: str, backend: str, tmp_path: Path) -> None:
    path = _make(name, tmp_path)
    core = _core(_load(path, backend=backend))

    got = _answers(core, _prompts())

    assert got == Oracle(path, "float32").generate_greedy(_prompts(), _NUM_TOKENS, ignore_eos=True)


@pytest.mark.often("phi3-longrope")
@pytest.mark.parametrize("name", ["llama-dynamic", "llama-longrope", "phi3-longrope"])
def test_a_preempted_sequence_is_computed_again_as_it_was(name: str, tmp_path: Path) -> None:
    path = _make(name, tmp_path)
    kv_bytes_of_block = 16 * 4 * 2 * 2 * 16 * 4
    core = _core(_load(path, kv_bytes=5 * kv_bytes_of_block + 8 * 4096))

    got = _answers(core, _prompts())

    assert core.load().preemptions > 0
    assert got == Oracle(path, "float32").generate_greedy(_prompts(), _NUM_TOKENS, ignore_eos=True)


@pytest.mark.often("llama-dynamic")
@pytest.mark.parametrize("name", ["llama-dynamic", "llama-longrope", "phi3-longrope"])
def test_a_prompt_finds_no_keys_of_a_prompt_of_another_kind_of_length(name: str, tmp_path: Path) -> None:
    path = _make(name, tmp_path)
    long = _prompts()[-1]
    prompts = [long[:20], long[:36], long, long[:30]]
    core = _core(_load(path))

    got = [_answers(core, [prompt])[0] for prompt in prompts]

    assert got == Oracle(path, "float32").generate_greedy(prompts, _NUM_TOKENS, ignore_eos=True)


@pytest.mark.parametrize(("length", "chunk"), [(30, 13), (31, 1), (32, 13), (32, 32)])
def test_a_model_recomputes_per_sequence_in_any_chunks(length: int, chunk: int, tmp_path: Path) -> None:
    path = _make("phi3-longrope", tmp_path)
    prompt = _prompts()[-1][:length]
    core = _core(_load(path), chunk=chunk)
    core.add(PromptState("p", "r", prompt, SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0, n=2)))

    answers = run(core)

    expected = Oracle(path, "float32").generate_greedy([prompt], _NUM_TOKENS, ignore_eos=True)
    assert [answers.tokens["p", index] for index in range(2)] == expected * 2


@pytest.mark.combinations(1)
@pytest.mark.parametrize("name", ["llama-dynamic", "llama-longrope", "phi3-longrope"])
@pytest.mark.parametrize("given", [1, 9])
def test_a_sequence_continues_elsewhere_as_it_would_have(name: str, given: int, tmp_path: Path) -> None:
    path = _make(name, tmp_path)
    prompts = _prompts()
    expected = Oracle(path, "float32").generate_greedy(prompts, _NUM_TOKENS, ignore_eos=True)
    core, params = _core(_load(path)), SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0)
    for number, prompt in enumerate(prompts):
        outputs = (tuple(expected[number][:given]),)
        core.add(PromptState(f"p{number}", f"r{number}", prompt, params, outputs=outputs))

    answers = run(core, Answers(tokens={(f"p{n}", 0): tokens[:given] for n, tokens in enumerate(expected)}))

    assert [answers.tokens[f"p{number}", 0] for number in range(len(prompts))] == expected


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama-dynamic", "llama-longrope"])
def test_every_rank_of_two_rotates_alike(name: str, tmp_path: Path) -> None:
    path, lost = _make(name, tmp_path), list[PdserveError]()
    options = RanksOptions(cores=((), ()), num_threads=1, step_s=30.0)
    loaded = load_ranks(
        path, dtype="float32", block_size=16, kv_cache_memory=2 << 20, ranks=options, on_lost=lost.append
    )

    got = _answers(core := _core(loaded.model), _prompts())

    core.close()
    assert got == Oracle(path, "float32").generate_greedy(_prompts(), _NUM_TOKENS, ignore_eos=True)
    assert lost == []


def test_the_length_of_a_token_is_its_prompts_or_its_own() -> None:
    assert token_lengths(0, 4, 3) == [3, 3, 3, 4]
    assert token_lengths(7, 2, 3) == [8, 9]


def test_keys_are_shared_by_prompts_that_rotate_alike() -> None:
    dynamic, longrope = RopeLengths("dynamic", 32), RopeLengths("longrope", 32)

    assert len({dynamic.rotation(length) for length in (1, 32)}) == 1
    assert len({dynamic.rotation(length) for length in (32, 33, 34)}) == 3
    assert len({longrope.rotation(length) for length in (32, 33, 34)}) == 2


def test_no_salt_reads_as_a_kind_of_length() -> None:
    rope = RopeLengths("longrope", 32)
    pool, kind = BlockPool(10, cached_block_size=16, rope=rope), rope.rotation(64)
    names = {
        pool.chain(PromptState("p", "r", ids, SamplingParams(max_tokens=1), cache_salt=salt)).name(0, ids)
        for ids in (tuple(range(32)), tuple(range(64)))
        for salt in ("A", f"A{kind}", f"A\0{kind}", "A\0rope long", kind, "")
    }

    assert len(names) == len({name.digest for name in names}) == 12


@pytest.mark.parametrize("length", [31, 32, 33, 64, 101])
@pytest.mark.parametrize("settings", [_DYNAMIC, _longrope(8)], ids=["dynamic", "longrope"])
def test_frequencies_are_those_of_a_lone_sequence_in_transformers(settings: dict[str, Any], length: int) -> None:
    config = tiny_config("llama", **settings)
    lone = AutoModelForCausalLM.from_config(config).model.rotary_emb
    lone(torch.zeros(1, length, 1), torch.arange(length)[None])

    rows = Frequencies(AutoModelForCausalLM.from_config(config).model.rotary_emb)([5, length, 200])

    assert torch.equal(rows[1], lone.inv_freq)


def test_dynamic_ends_at_factor_times_its_start(tmp_path: Path) -> None:
    path = _make("llama-dynamic", tmp_path)

    assert _load(path).info.max_model_len == 4 * _BORDER
    with pytest.raises(ConfigError, match="--max-model-len is 129, but must be from 1 to the model's 128"):
        _load(path, max_model_len=129)


@pytest.mark.often("cohere-dynamic", "phi3-longrope", "deepseek_v2-dynamic")
@pytest.mark.parametrize("name", _MODELS)
def test_shapes_alone_give_the_layers_kv(name: str, tmp_path: Path) -> None:
    path = _make(name, tmp_path)

    assert rehearse(open_checkpoint(path), "float32") == _load(path).info.layout.tensors


def test_a_rotary_module_with_its_own_way_is_refused(tmp_path: Path) -> None:
    settings = _longrope(8, short_mscale=1.0, long_mscale=1.5)
    path = make_family("phimoe", tmp_path, **settings)

    with pytest.raises(ConfigError, match="phimoe: PhimoeRotaryEmbedding cannot compute rope type longrope row by row"):
        rehearse(open_checkpoint(path), "float32")


def test_lengths_of_some_layer_types_alone_are_refused(tmp_path: Path) -> None:
    parameters = {
        "full_attention": _longrope(8)["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    path = make_family("gemma3_text", tmp_path, rope_parameters=parameters)

    with pytest.raises(ConfigError, match="rope type longrope applies only to full_attention layers"):
        _load(path)


def _make(name: str, folder: Path) -> Path:
    model_type, settings = _MODELS[name]
    return make_family(model_type, folder, **settings)


def _load(path: Path, *, backend: str = "auto", kv_bytes: int = 2 << 20, max_model_len: int | None = None) -> Model:
    return load_model(
        path,
        dtype="float32",
        block_size=16,
        kv_cache_memory=kv_bytes,
        num_threads=1,
        attention_backend=backend,
        max_model_len=max_model_len,
    ).model


def _core(model: Model, *, chunk: int = 13) -> EngineCore:
    return EngineCore(model, max_num_seqs=8, max_num_batched_tokens=32, prefill_chunk_size=chunk)


def _prompts() -> list[tuple[int, ...]]:
    numbers = random.Random(4)
    return [tuple(numbers.randrange(3, VOCAB_SIZE - 20) for _ in range(length)) for length in _LENGTHS]


def _answers(core: EngineCore, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    params = SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0)
    for number, prompt in enumerate(prompts):
        core.add(PromptState(f"p{number}", f"r{number}", tuple(prompt), params))
    answers = run(core)
    assert answers.failed == []
    return [answers.tokens[f"p{number}", 0] for number in range(len(prompts))]
