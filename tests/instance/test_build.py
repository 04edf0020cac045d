"""An instance's engine on a device: its pool leaves memory for its steps, and the loss of the device is reported."""

from pathlib import Path

import pytest

from devices import table
from engine.core import EngineCore
from flags.options import EngineOptions
from instance.build import build_engine
from instance.config import InstanceConfig
from tests.devices.dying_device import FAULT, DyingDevice
from tests.devices.fake_device import FakeDevice, FakeKind
from tests.engine.fake_engines import run
from tests.engine.tiny_models import make_tiny_model
from wire.errors import InstanceLost, PdserveError
from wire.types import PromptState, Role, SamplingParams


class OneKind(FakeKind):
    """Opens the given device."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(device.traits)
        self._device = device

    def open(self, index: int = 0) -> FakeDevice:
        return self._device


def config(path: Path, **options: object) -> InstanceConfig:
    engine = EngineOptions(str(path), device="fake", dtype="float32", **options)  # type: ignore[arg-type]
    return InstanceConfig(engine, Role.COMBINED)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_tiny_model("llama", tmp_path / "llama")


def test_the_pool_leaves_memory_for_the_largest_step_of_its_flags(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table.KINDS, "fake", OneKind(FakeDevice(total_bytes=96 << 20)))

    def left(**options: object) -> float:
        engine, notes = build_engine(config(llama, **options), lambda error: None)
        engine.close()
        (note,) = [note for note in notes if note.startswith("KV pool: ")]
        return float(note.rpartition(", ")[2].removesuffix(" MiB left for steps"))

    assert left(prefill_chunk_size=96, max_num_seqs=256) > left(prefill_chunk_size=8, max_num_seqs=2)


def test_the_loss_of_its_device_is_reported(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, losses = DyingDevice(total_bytes=96 << 20), list[PdserveError]()
    monkeypatch.setitem(table.KINDS, "fake", OneKind(device))
    engine, _ = build_engine(config(llama, kv_cache_memory=2 << 20, max_num_seqs=4), losses.append)
    assert isinstance(engine, EngineCore)
    engine.add(PromptState("well", "r", (5, 9, 11), SamplingParams(max_tokens=2, temperature=0.0)))
    assert run(engine).failed == []

    def launch(*args: object) -> None:
        device.fails_with = RuntimeError(FAULT)
        raise RuntimeError(FAULT)

    monkeypatch.setattr("engine.torch_model.TorchModel.launch", launch)
    engine.add(PromptState("ill", "r", (5, 9, 11), SamplingParams(max_tokens=2, temperature=0.0)))

    assert [name for name, _ in run(engine).failed] == ["ill"]
    assert [type(error) for error in losses] == [InstanceLost]
    assert str(losses[0]).startswith("fake:0 fails a small test op: RuntimeError: CUDA error: an illegal memory")
    engine.close()
