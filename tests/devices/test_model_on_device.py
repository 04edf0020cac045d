"""The torch model on a device that is not the CPU by kind: the fake one, in one file (fake_device.py)."""

import random
from pathlib import Path

import pytest
import torch

from engine.loader import load_model
from engine.oracle import Oracle
from engine.torch_model import TorchModel
from tests.devices.fake_device import FakeDevice
from tests.engine.step_runner import generate
from tests.engine.tiny_models import KINDS, VOCAB_SIZE, make_tiny_model


def load(path: Path, device: FakeDevice, *, memory: int | None = 2 << 20) -> TorchModel:
    return load_model(
        path, dtype="float32", block_size=32, kv_cache_memory=memory, num_threads=1, device=device
    ).model  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    path, numbers = make_tiny_model(kind, tmp_path / kind), random.Random(11)
    prompts = [[numbers.randrange(3, VOCAB_SIZE - 20) for _ in range(length)] for length in (1, 17, 90)]

    model = load(path, FakeDevice(index=1))
    got = generate(model, prompts, 24, chunk=13)

    assert got == Oracle(path, "float32").generate_greedy(prompts, 24, ignore_eos=True)
    assert model.info.device == "fake:1"
    assert model.memory.fd is None
    model.close()


def test_the_pool_is_the_devices_share_and_starts_where_its_rules_say(tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path / "llama")

    model = load(path, FakeDevice(total_bytes=8 << 20), memory=None)

    tensor: torch.Tensor = model.memory.tensor  # type: ignore[attr-defined]
    assert tensor.data_ptr() % (2 << 20) == 0
    assert 6 << 20 < tensor.numel() <= 8 * 0.9 * 2**20
    model.close()


def test_blocks_come_back_from_the_swap_area_as_they_left(tmp_path: Path) -> None:
    model = load(make_tiny_model("llama", tmp_path / "llama"), FakeDevice())
    tensor: torch.Tensor = model.memory.tensor  # type: ignore[attr-defined]
    tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8))
    before = tensor.clone()

    model.save_blocks([5, 1, 7], [0, 2, 90])
    tensor.zero_()
    model.load_blocks([90, 0, 2], [7, 5, 1])

    layout = model.info.layout
    for offset, spec in zip(layout.offsets, layout.tensors, strict=True):
        size = layout.block_size * spec.token_bytes
        for block in range(layout.num_blocks):
            start = offset + block * size
            kept = before[start : start + size] if block in (5, 1, 7) else torch.zeros(size, dtype=torch.uint8)
            assert torch.equal(tensor[start : start + size], kept)
    model.close()


def test_a_layer_is_reported_behind_the_mark_of_its_kv(tmp_path: Path) -> None:
    device = FakeDevice()
    model = load(make_tiny_model("llama", tmp_path / "llama"), device)
    from engine.step import BatchSequence, StepBatch

    seen: list[tuple[int, int]] = []
    batch = StepBatch((3, 4, 5), (BatchSequence(0, 3, (2,)),), ())
    model.launch(batch, lambda layer: seen.append((layer, device.recorded))).collect()
    model.memory.ready()  # type: ignore[attr-defined]

    assert seen == [(0, 1), (1, 2)]
    assert device.waited == 1
    model.close()
