"""--enforce-eager: whether an instance's decode steps are replayed from graphs."""

from pathlib import Path

import pytest

from devices import table
from engine.core import EngineCore
from engine.oracle import Oracle
from flags.options import EngineOptions
from instance.build import build_engine
from instance.config import InstanceConfig
from tests.devices.capturing_device import CapturingDevice
from tests.devices.fake_device import FakeKind
from tests.engine.fake_engines import run
from tests.engine.tiny_models import make_tiny_model
from wire.types import PromptState, Role, SamplingParams


class CapturingKind(FakeKind):
    """Opens one device, and keeps it as an attribute."""

    def __init__(self, device: CapturingDevice) -> None:
        super().__init__(device.traits)
        self._device = device

    def open(self, index: int = 0) -> CapturingDevice:
        return self._device


@pytest.mark.combinations(1)
@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("eager", [False, True])
def test_decode_steps_are_replayed_unless_enforce_eager_is_given(
    eager: bool, role: Role, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instance of any role captures at its start, because its role may be switched, and not later."""
    path, device = make_tiny_model("llama", tmp_path / "llama"), CapturingDevice()
    monkeypatch.setitem(table.KINDS, "fake", CapturingKind(device))
    options = EngineOptions(
        str(path), device="fake", dtype="float32", enforce_eager=eager, max_num_seqs=4, kv_cache_memory=2 << 20
    )

    stages: list[str] = []
    engine, notes = build_engine(InstanceConfig(options, role), lambda error: None, stages.append)
    assert isinstance(engine, EngineCore)
    assert stages == ["weights", "graphs"][: 1 if eager else 2]
    assert device.captured == (0 if eager else 3)
    engine.add(PromptState("p", "r", (5, 9, 11), SamplingParams(max_tokens=6, temperature=0.0)))
    tokens = run(engine).tokens["p", 0]

    assert tokens == Oracle(path, "float32").generate_greedy([(5, 9, 11)], 6, ignore_eos=True)[0]
    assert device.replays == (0 if eager else 5)
    assert device.captured == (0 if eager else 3), "nothing is captured once the instance is ready"
    assert any(note.startswith("attention by torch: ") for note in notes)
    engine.close()
