"""Encoders on every device: the same vectors and scores as on the CPU, with weights and inputs on the device."""

import gc
from pathlib import Path

import pytest

from devices.cpu import CpuDevice
from devices.interface import Device
from devices.table import KINDS
from engine.checkpoints.model_identity import identify
from engine.pooling.core import EncoderCore
from engine.pooling.encoder import load_encoder
from flags.options import EngineOptions
from instance.config import InstanceConfig
from instance.encoders import load_encoder_engine
from tests.devices.card_device import CardDevice
from tests.devices.dying_device import FAULT, DyingDevice
from tests.devices.fake_device import TRAITS, FakeDevice, FakeKind
from tests.engine.tiny_encoders import TEXTS, make_bert, make_cross_encoder
from wire.errors import ConfigError, InstanceLost, PdserveError
from wire.types import Pooling, PromptState, Role, SamplingParams


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cross_encoder(tmp_path_factory.mktemp("models") / "cross")


def answers(path: Path, device: Device, requested: list[Pooling]) -> list[tuple[float, ...]]:
    """Return the answer for each text, with the options of `requested` in turn."""
    encoder, _ = load_encoder(path, dtype="float32", device=device)
    core = EncoderCore(
        encoder, identify(path, "m"), block_size=device.traits.block_size, max_num_seqs=4, max_num_batched_tokens=256
    )  # fmt: skip
    assert core.info.device == device.name
    for i, text in enumerate(TEXTS):
        core.add(PromptState(str(i), "r", text, SamplingParams(max_tokens=1), pooling=requested[i % len(requested)]))
    found: dict[str, tuple[float, ...]] = {}
    while core.has_work():
        result = core.step()
        assert not result.failed
        found |= {one.prompt_id: one.values for one in result.pooled}
    core.close()
    return [found[str(i)] for i in range(len(TEXTS))]


def test_vectors_equal_those_of_the_cpu(device: Device, bert: Path) -> None:
    requests = [
        Pooling(how="mean"),
        Pooling(how="cls", normalize=False, second_text=2),
        Pooling(how="last", dimensions=5),
    ]

    found, expected = answers(bert, device, requests), answers(bert, CpuDevice(), requests)

    assert [len(vector) for vector in found] == [24, 24, 5] * 2
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


def test_scores_equal_those_of_the_cpu(device: Device, cross_encoder: Path) -> None:
    found, expected = (
        answers(cross_encoder, one, [Pooling("classify", second_text=2)]) for one in (device, CpuDevice())
    )  # fmt: skip

    assert max(found)[0] - min(found)[0] > 1e-3
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


def test_weights_are_on_the_device_and_the_note_has_their_size(bert: Path) -> None:
    device = CardDevice()
    gc.collect()  # tensors of earlier tests
    before = device.memory().free

    encoder, notes = load_encoder(bert, dtype="bfloat16", device=device)

    network = encoder._network
    tensors = [*network.parameters(), *network.buffers()]
    used = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert {tensor.device for tensor in tensors} == {device.torch_device}
    assert device.memory().free == before - used
    assert notes[-1].endswith(f"; {used / 2**20:.0f} MiB of weights on {device.name}")


def test_weights_that_do_not_fit_are_refused_with_both_numbers(bert: Path) -> None:
    device = FakeDevice(total_bytes=1000)

    with pytest.raises(ConfigError, match=r"\d{4,} bytes of weights do not fit on fake:0: 1000 are free"):
        load_encoder(bert, dtype="float32", device=device)


def test_an_instance_opens_its_encoder_on_the_device_of_its_flag(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "fake", FakeKind())
    config = InstanceConfig(EngineOptions(model=str(bert), device="fake"), Role.COMBINED, device_ids=("0",))

    loaded = load_encoder_engine(config, lambda error: None)

    assert loaded is not None
    engine, notes = loaded
    assert (engine.info.device, engine.info.layout.block_size) == ("fake:0", TRAITS.block_size)
    assert notes[0] == "device fake, as requested (fake:0: tensors of the CPU)"
    engine.close()


def test_an_encoder_whose_device_is_lost_ends_its_instance(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, reported = DyingDevice(), list[PdserveError]()

    class DyingKind(FakeKind):
        def open(self, index: int = 0) -> DyingDevice:
            return device

    def fail(*args: object) -> None:
        device.fails_with = RuntimeError(FAULT)
        raise RuntimeError(FAULT)

    monkeypatch.setitem(KINDS, "fake", DyingKind())
    config = InstanceConfig(EngineOptions(model=str(bert), device="fake"), Role.COMBINED, device_ids=("0",))
    loaded = load_encoder_engine(config, reported.append)
    assert loaded is not None
    engine, _ = loaded
    monkeypatch.setattr("engine.pooling.encoder.Encoder.run", fail)

    for name in "ab":
        engine.add(PromptState(name, "r", TEXTS[0], SamplingParams(max_tokens=1), pooling=Pooling()))
        ((failed, error),) = engine.step().failed
        assert failed == name
        assert "InstanceLost: fake:0 fails a small test op" in str(error)
    assert [type(error) for error in reported] == [InstanceLost]
    engine.close()
