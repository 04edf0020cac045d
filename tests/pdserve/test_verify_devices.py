"""The pairs of devices that `pdserve verify` tests, the transports of each, and its messages about missing ones."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from devices import npu, table
from devices.cpu import CpuKind
from devices.interface import DeviceKind
from kvtransfer.transport_table import default_names
from pdserve import verify
from pdserve.process_plan import ProcessPlan
from pdserve.verify_devices import EACH, DeviceKindPair, DevicePairs, choose_pairs
from pdserve.verify_runs import Deployment, VerifyOutputs, alone, pair
from pdserve.verify_transports import choose
from tests.devices.fake_device import TRAITS, FakeKind
from tests.engine.tiny_models import make_tiny_model
from wire.errors import ConfigError


@dataclass
class NoCard(FakeKind):
    """A kind whose card is not in this machine."""

    def sees_card(self) -> bool:
        return False


NAMED = replace(TRAITS, kind="npu", collective="hccl", pool_alignment=npu.TRAITS.pool_alignment)
KINDS: dict[str, DeviceKind] = {"cpu": CpuKind(), "fake": FakeKind(), "npu": FakeKind(NAMED, why="CANN is missing")}


def test_each_is_every_pair_of_the_kinds_usable_here() -> None:
    pairs = choose_pairs(EACH, KINDS)

    assert [str(one) for one in pairs.pairs] == ["cpu -> cpu", "cpu -> fake", "fake -> cpu", "fake -> fake"]
    assert pairs.kinds == ("cpu", "fake")
    assert pairs.describe() == (
        "devices: cpu -> cpu, cpu -> fake, fake -> cpu, fake -> fake; no others: npu cannot be used: CANN is missing"
    )


def test_a_machine_without_cards_has_one_pair() -> None:
    pairs = choose_pairs(EACH, {"cpu": CpuKind(), "fake": NoCard()})

    assert pairs.pairs == (DeviceKindPair("cpu", "cpu"),)
    assert pairs.describe() == (
        "devices: cpu -> cpu, the only pair that this machine can form: no fake card is visible here"
    )


@pytest.mark.parametrize(
    ("requested", "ends"),
    [("cpu", ("cpu", "cpu")), ("fake", ("fake", "fake")), ("cpu:fake", ("cpu", "fake")), ("fake:cpu", ("fake", "cpu"))],
)
def test_one_pair_is_selected_by_its_kinds(requested: str, ends: tuple[str, str]) -> None:
    assert choose_pairs(requested, KINDS) == DevicePairs((DeviceKindPair(*ends),), {})


@pytest.mark.parametrize(
    ("requested", "words"),
    [
        ("tpu", "--device 'tpu' is not one of auto, cpu, fake, npu"), ("cpu:npu", "--device npu: CANN is missing"),
        ("cpu:fake:cpu", "names 3 ends: a pair is P:D, such as cpu:npu"), ("cpu:", "--device '' is not one of"),
    ],
)  # fmt: skip
def test_an_impossible_pair_is_refused_with_a_reason(requested: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_pairs(requested, KINDS)


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has a CPU, the fake device, and one with hccl's groups."""
    for name, kind in {**KINDS, "cuda": NoCard(), "npu": FakeKind(NAMED)}.items():
        monkeypatch.setitem(table.KINDS, name, kind)


@pytest.mark.usefixtures("kinds")
def test_each_pair_has_the_transports_of_both_its_ends() -> None:
    here, mixed, npus = (choose("each", pair=DeviceKindPair(*ends)) for ends in (
        ("cpu", "cpu"), ("cpu", "fake"), ("cpu", "npu"),
    ))  # fmt: skip

    assert {"shm", "process_group", "tcp"} <= set(here.names)
    assert {"process_group", "tcp"} <= set(mixed.names)
    assert mixed.lacking["shm"] == "the KV pool is on fake:0: peers can map host memory only"
    assert "tcp" in npus.names
    assert npus.lacking["process_group"] == "process_group uses gloo on cpu but hccl on npu"
    with pytest.raises(ConfigError, match="--transport shm cannot run here: the KV pool is on fake:0"):
        choose("shm", pair=DeviceKindPair("fake", "cpu"))
    assert choose("each", default_names("fake"), DeviceKindPair("fake", "fake")).names == ("tcp",)


def test_each_end_gets_its_device(tmp_path: Path) -> None:
    made: Deployment = pair(tmp_path, ("--model", "/m"), "tcp", DeviceKindPair("cpu", "fake"))

    assert [last_device(plan) for plan in made.instances] == ["cpu", "fake"]
    assert [plan.role for plan in made.instances] == ["prefill", "decode"]
    assert last_device(alone(("--device", "fake")).instances[0]) == "fake"


def last_device(plan: ProcessPlan) -> str:
    """The last device that a command names."""
    places = [place for place, word in enumerate(plan.command) if word == "--device"]
    return plan.command[places[-1] + 1]


@pytest.mark.usefixtures("kinds")
def test_every_pair_and_every_single_kind_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The instances' outputs are scripted; real models cross in tests/instance/test_mixed_devices.py."""
    requests: list[tuple[object, str]] = []

    def through_pd(*given: object) -> VerifyOutputs:
        requests.append((given[3], str(given[4])))
        return VerifyOutputs([], [[7, 7, 7]] * 2, 4096, [])

    monkeypatch.setattr("pdserve.verify.logs.configure", lambda _: None)
    monkeypatch.setitem(table.KINDS, "npu", NoCard(NAMED))
    monkeypatch.setattr(verify, "through_pd", through_pd)
    combined = VerifyOutputs([(1, 2)] * 2, [[7, 7, 7]] * 2, 0, [3, 1])
    monkeypatch.setattr(verify, "through_combined", lambda *_: (combined, combined))
    oracle = SimpleNamespace(generate_greedy=lambda *_, **__: [[7, 7, 7]] * 2)
    monkeypatch.setattr(verify, "_run_transformers", lambda *_: (oracle, [[7, 7, 7]] * 2))
    monkeypatch.setattr(verify, "choose_pairs", lambda requests: choose_pairs(requests, KINDS))
    flags = ["--model", str(make_tiny_model("llama", tmp_path)), "--prompts", "2", "--max-tokens", "3"]

    status = verify.main([*flags, "--transport", "shm"])
    over_shm = capsys.readouterr().out.splitlines()
    status += verify.main([*flags, "--transport", "tcp"])
    over_tcp = capsys.readouterr().out.splitlines()

    assert status == 0
    assert requests == [
        ("shm", "cpu -> cpu"), *(("tcp", one) for one in ("cpu -> cpu", "cpu -> fake", "fake -> cpu", "fake -> fake")),
    ]  # fmt: skip
    refused = "not run: P/D cpu -> fake over shm: --transport shm cannot run here: the KV pool is on fake:0"
    assert any(line.startswith(refused) for line in over_shm)
    assert over_tcp[-1] == (
        "equal: P/D cpu -> cpu over tcp = P/D cpu -> fake over tcp = P/D fake -> cpu over tcp = "
        "P/D fake -> fake over tcp = combined on cpu = combined on fake = transformers"
    )


@pytest.mark.usefixtures("kinds")
def test_features_are_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.verify.logs.configure", lambda _: None)

    with pytest.raises(ConfigError, match="--features needs the same device at both ends, not cpu:fake"):
        verify.main(["--features", "--device", "cpu:fake"])
