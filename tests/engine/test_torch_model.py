"""Paged, chunked and batched greedy output equals plain transformers, token for token, in float32."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from engine.attention.registered import NAME
from engine.loader import load_model
from engine.oracle import Oracle
from engine.step import BatchSequence, SampleRow, StepBatch
from engine.torch_model import TorchModel
from tests.devices.open_files import file_of, open_files
from tests.engine.step_runner import GREEDY, generate
from tests.engine.tiny_models import KINDS, VOCAB_SIZE, make_tiny_model
from wire.types import SamplingParams

_NUM_TOKENS = 24
_LENGTHS = (1, 16, 17, 45, 90)

MakeModel = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Return a function that makes each kind of tiny model once."""
    return cache(lambda kind: make_tiny_model(kind, tmp_path_factory.mktemp("models") / kind))


def _load(path: Path, *, block_size: int = 16, backend: str = "auto") -> TorchModel:
    return load_model(
        path,
        dtype="float32",
        block_size=block_size,
        kv_cache_memory=2 << 20,
        num_threads=1,
        attention_backend=backend,
    ).model


def _prompts(lengths: tuple[int, ...] = _LENGTHS) -> list[list[int]]:
    numbers = random.Random(11)
    return [[numbers.randrange(3, VOCAB_SIZE - 20) for _ in range(length)] for length in lengths]


@pytest.mark.often("llama-reference", "mistral-sliding-reference", "llama3-cpu", "opt-reference")
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_is_that_of_transformers(checkpoint: MakeModel, kind: str, backend: str) -> None:
    path = checkpoint(kind)
    expected = Oracle(path, "float32").generate_greedy(_prompts(), _NUM_TOKENS, ignore_eos=True)

    got = generate(_load(path, backend=backend), _prompts(), _NUM_TOKENS, chunk=13)

    assert got == expected


@pytest.mark.combinations(1)
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("chunk", [1, 16, 512])
def test_block_and_chunk_size_do_not_matter(checkpoint: MakeModel, block_size: int, chunk: int) -> None:
    path = checkpoint("mistral-sliding")
    expected = Oracle(path, "float32").generate_greedy(_prompts(), 8, ignore_eos=True)

    assert generate(_load(path, block_size=block_size), _prompts(), 8, chunk=chunk) == expected


def test_a_sampled_sequence_is_the_same_alone_and_in_a_batch(checkpoint: MakeModel) -> None:
    model = _load(checkpoint("llama"))
    params = SamplingParams(max_tokens=1, temperature=0.9, top_p=0.9, seed=77)

    together = generate(model, _prompts(), 12, chunk=20, params=params)

    assert together == [generate(model, [prompt], 12, chunk=20, params=params)[0] for prompt in _prompts()]


def test_layers_are_reported_in_order_once_their_kv_is_written(checkpoint: MakeModel) -> None:
    model = _load(checkpoint("qwen3"))
    layout = model.info.layout
    seen: list[tuple[int, bool]] = []

    def layer_done(layer: int) -> None:
        written = [any(_first_slot(model, index)) for index in layout.tensors_of(layer)]
        seen.append((layer, all(written)))

    model.launch(_one_token(block=0), layer_done)

    assert seen == [(0, True), (1, True)]


def test_copy_block_copies_every_tensor(checkpoint: MakeModel) -> None:
    model = _load(checkpoint("llama"))
    layout = model.info.layout
    model.launch(_one_token(block=2))

    model.copy_block(2, 5)

    for index in range(len(layout.tensors)):
        source, target = (next(iter(layout.runs(index, [block], 0, layout.block_size))) for block in (2, 5))
        copied = bytes(model.memory.buffer[target.offset : target.offset + target.length])
        assert any(copied)
        assert copied == bytes(model.memory.buffer[source.offset : source.offset + source.length])


@pytest.mark.combinations(1)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_output_is_near_the_best_of_transformers(
    checkpoint: MakeModel, dtype: str, backend: str
) -> None:
    path, prompt = checkpoint("qwen3"), _prompts()[3]
    model = load_model(
        path, dtype=dtype, block_size=16, kv_cache_memory=1 << 20, num_threads=1, attention_backend=backend
    ).model
    oracle = Oracle(path, dtype)

    tokens = generate(model, [prompt], 8, chunk=13)[0]

    gaps = [oracle.logit_gap([*prompt, *tokens[:i]], token).gap for i, token in enumerate(tokens)]
    assert max(gaps) < 0.2  # logits span about 8 either way


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_a_closed_model_releases_its_pool(checkpoint: MakeModel, kind: str) -> None:
    model = _load(checkpoint(kind))
    step = StepBatch((3, 4), (BatchSequence(0, 2, (0,)),), (SampleRow(1, GREEDY, 0, 0),))
    model.launch(step).collect()
    model.save_blocks([0], [0])
    assert model.memory.fd is not None
    pool = file_of(model.memory.fd)
    assert pool in open_files()

    model.close()
    model.close()

    assert pool not in open_files(), "it is freed by the call, even if the model is still held"
    with pytest.raises(IndexError):
        model.launch(step)


def test_a_tensor_over_a_pool_keeps_its_memory(checkpoint: MakeModel) -> None:
    model = _load(checkpoint("opt"))
    keys = model._pools[0].keys
    assert model.memory.fd is not None
    pool = file_of(model.memory.fd)

    model.close()

    assert pool in open_files(), "a reader of it must not crash the process"
    assert not keys.any()


def test_a_step_without_samples_returns_nothing(checkpoint: MakeModel) -> None:
    model = _load(checkpoint("opt"))

    step = model.launch(StepBatch((3, 4), (BatchSequence(0, 2, (0,)),), ()))

    assert step.collect().token_ids == []


def test_rows_are_chosen_afterwards_if_the_model_cannot_choose_them(checkpoint: MakeModel) -> None:
    model = _load(checkpoint("llama"))
    batch = StepBatch((3, 4, 5), (BatchSequence(0, 3, (0,)),), (SampleRow(2, GREEDY, 0, 0), SampleRow(0, GREEDY, 0, 0)))
    chosen_before = model.logits(batch)
    model._keeps_logits = False

    torch.testing.assert_close(model.logits(batch), chosen_before)


def test_the_network_runs_our_attention(checkpoint: MakeModel) -> None:
    model = _load(checkpoint("llama"))

    assert model._network.config._attn_implementation == NAME


def _one_token(block: int) -> StepBatch:
    return StepBatch((7,), (BatchSequence(0, 1, (block,)),), (SampleRow(0, GREEDY, 0, 0),))


def _first_slot(model: TorchModel, index: int) -> bytes:
    run = next(iter(model.info.layout.runs(index, [0], 0, 1)))
    return bytes(model.memory.buffer[run.offset : run.offset + run.length])
