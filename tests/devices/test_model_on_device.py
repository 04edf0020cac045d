"""The torch model on every device: greedy output equals transformers', and its pool is on the device."""

import gc
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from devices.interface import Device
from engine.attention import npu_fused
from engine.loader import load_model
from engine.oracle import Oracle
from engine.step import BatchSequence, StepBatch
from engine.torch_model import TorchModel
from tests.devices import card
from tests.devices.card_device import CardDevice
from tests.devices.every_device import open_device
from tests.devices.fake_device import FakeDevice, FakeEvent
from tests.engine.step_runner import generate
from tests.engine.tiny_families import NAMED, make_family
from tests.engine.tiny_models import KINDS, VOCAB_SIZE, make_tiny_model
from tests.npu import attention_ops
from tests.npu.ops import npu_ops

NUM_TOKENS = 16


def prompts() -> list[list[int]]:
    numbers = random.Random(11)
    return [[numbers.randrange(3, VOCAB_SIZE - 20) for _ in range(length)] for length in (1, 17, 90)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that makes each kind of tiny model once."""
    folder = tmp_path_factory.mktemp("models")
    return cache(lambda kind: make_tiny_model(kind, folder / kind))


@pytest.fixture(scope="module")
def oracle(models: Callable[[str], Path]) -> Callable[[str], list[list[int]]]:
    """Return a function that computes transformers' answers once."""
    return cache(lambda kind: Oracle(models(kind), "float32").generate_greedy(prompts(), NUM_TOKENS, ignore_eos=True))


def load(path: Path, device: Device, *, block_size: int = 32, memory: int | None = 4 << 20) -> TorchModel:
    return load_model(
        path, dtype="float32", block_size=block_size, kv_cache_memory=memory, num_threads=1, device=device
    ).model  # fmt: skip


def bytes_of(model: TorchModel) -> torch.Tensor:
    tensor: torch.Tensor = model.memory.tensor  # type: ignore[attr-defined]
    return tensor


@pytest.mark.often("card-qwen2", "npu-qwen3", "fake-llama3")
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_equals_transformers(
    kind: str, device: Device, models: Callable[[str], Path], oracle: Callable[[str], list[list[int]]]
) -> None:
    model = load(models(kind), device, block_size=device.traits.block_size)

    got = generate(model, prompts(), NUM_TOKENS, chunk=13)

    assert got == oracle(kind)
    assert model.info.device == device.name
    assert (model.memory.fd is None) != device.traits.pools_on_host
    model.close()


@pytest.mark.often("mistral-sliding")
@pytest.mark.parametrize("kind", ["qwen3", "mistral-sliding"])
def test_npu_ops_get_only_lists_from_the_host(
    kind: str, monkeypatch: pytest.MonkeyPatch, models: Callable[[str], Path],
    oracle: Callable[[str], list[list[int]]],
) -> None:  # fmt: skip
    device = open_device("card-npu")
    monkeypatch.setattr(
        attention_ops.Dtypes, "also_float32", True
    )  # no NPU does; otherwise attention would run in torch
    for name in ("DTYPES", "TND_DTYPES"):
        monkeypatch.setattr(npu_fused, name, (*getattr(npu_fused, name), torch.float32))
    calls = npu_ops().calls
    model = load(models(kind), device, block_size=128)
    calls.clear()

    got = generate(model, prompts(), NUM_TOKENS, chunk=13)

    assert got == oracle(kind)
    assert {"npu_scatter_pa_kv_cache", "npu_fused_infer_attention_score"} <= {call.name for call in calls}
    model.close()


@pytest.mark.long
@pytest.mark.parametrize("model_type", NAMED)
def test_families_run_on_a_card_as_in_transformers(model_type: str, tmp_path: Path) -> None:
    path = make_family(model_type, tmp_path)
    model = load(path, CardDevice())

    got = generate(model, prompts(), 8, chunk=13)

    assert got == Oracle(path, "float32").generate_greedy(prompts(), 8, ignore_eos=True)
    model.close()


@pytest.mark.combinations(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_and_kv_have_the_requested_dtype(
    dtype: str, accelerator: Device, models: Callable[[str], Path]
) -> None:
    model = load_model(
        models("llama"), dtype=dtype, block_size=128, kv_cache_memory=4 << 20, num_threads=1, device=accelerator
    ).model  # fmt: skip

    lengths = [len(tokens) for tokens in generate(model, prompts(), 4, chunk=64)]

    assert lengths == [4, 4, 4]
    assert {tensor.dtype for tensor in model.info.layout.tensors} == {dtype}
    assert {parameter.dtype for parameter in model._network.parameters()} == {getattr(torch, dtype)}
    model.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_network_is_on_the_device(kind: str, models: Callable[[str], Path]) -> None:
    device = CardDevice()
    model = load(models(kind), device)

    tensors = dict([*model._network.named_parameters(), *model._network.named_buffers()])

    assert {name for name, tensor in tensors.items() if tensor.device != device.torch_device} == set()
    model.close()


def test_the_pool_is_aligned_and_uses_its_share_of_the_memory(models: Callable[[str], Path]) -> None:
    model = load(models("llama"), FakeDevice(total_bytes=8 << 20), memory=None)

    assert bytes_of(model).data_ptr() % (2 << 20) == 0
    assert 6 << 20 < bytes_of(model).numel() <= 8 * 0.9 * 2**20
    model.close()


def test_the_memory_of_weights_is_left_out_of_the_pools_share(models: Callable[[str], Path]) -> None:
    gc.collect()
    total = (64 << 20) + card.used_bytes()  # movers keep their staging buffers
    device = CardDevice(total)
    before = device.memory().free
    model = load(models("llama"), device, memory=None)
    weights = sum(parameter.numel() * 4 for parameter in model._network.parameters())

    pool = bytes_of(model).numel()

    assert 0 <= before - total * 0.1 - weights - pool < 1 << 20
    assert device.memory().free <= before - weights - pool
    model.close()
    del model
    gc.collect()
    assert device.memory().free >= before


def test_blocks_return_unchanged_from_the_swap_area(accelerator: Device, models: Callable[[str], Path]) -> None:
    model = load(models("llama"), accelerator)
    tensor, layout = bytes_of(model), model.info.layout
    before = torch.randint(0, 256, tensor.shape, dtype=torch.uint8)
    tensor.copy_(before)

    model.save_blocks([5, 1, 7], [0, 2, 90])
    tensor.zero_()
    model.load_blocks([90, 0, 2], [7, 5, 1])

    after = tensor.cpu()
    for offset, spec in zip(layout.offsets, layout.tensors, strict=True):
        size = layout.block_size * spec.token_bytes
        for block in range(layout.num_blocks):
            start = offset + block * size
            kept = before[start : start + size] if block in (5, 1, 7) else torch.zeros(size, dtype=torch.uint8)
            assert torch.equal(after[start : start + size], kept)
    model.close()


def test_a_block_is_copied_and_no_other_is_touched(accelerator: Device, models: Callable[[str], Path]) -> None:
    model = load(models("llama"), accelerator)
    layout, expected = model.info.layout, torch.randint(0, 256, bytes_of(model).shape, dtype=torch.uint8)
    bytes_of(model).copy_(expected)

    model.copy_block(3, 6)

    for offset, spec in zip(layout.offsets, layout.tensors, strict=True):
        size = layout.block_size * spec.token_bytes
        source, target = offset + 3 * size, offset + 6 * size
        expected[target : target + size] = expected[source : source + size].clone()
    assert torch.equal(bytes_of(model).cpu(), expected)
    model.close()


def test_a_layer_is_reported_with_an_event_after_its_kv(models: Callable[[str], Path]) -> None:
    device = FakeDevice()
    model = load(models("llama"), device)
    before, seen = device.recorded, list[tuple[int, int]]()

    batch = StepBatch((3, 4, 5), (BatchSequence(0, 3, (2,)),), ())
    model.launch(batch, lambda layer: seen.append((layer, device.recorded - before))).collect()
    model.memory.ready()  # type: ignore[attr-defined]

    assert seen == [(0, 1), (1, 2)]
    assert device.waited > 0
    model.close()


def test_a_block_is_copied_before_its_source_is_released(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next owner of the source may write it on another stream, which does not wait for this one."""
    done: list[str] = []
    monkeypatch.setattr(FakeEvent, "record", lambda self: done.append("record"))
    monkeypatch.setattr(FakeEvent, "synchronize", lambda self: done.append("synchronize"))
    model = load_model(
        models("llama"), dtype="float32", block_size=16, kv_cache_memory=2 << 20, num_threads=1, device=FakeDevice()
    ).model  # fmt: skip
    done.clear()

    model.copy_block(3, 6)

    assert done == ["record", "synchronize"]
    model.close()
