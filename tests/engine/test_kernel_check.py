"""Kernels are checked in a child process: what it finds, how it ends, and which findings are remembered."""

import io
import json
import stat
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from devices.cpu import CpuDevice
from devices.cuda import TRAITS as CUDA
from devices.cuda import CudaDevice
from devices.npu import NpuDevice
from engine import device_modules, kernel_child
from engine.attention import backend_choice
from engine.attention.backend_choice import trusted, with_alternatives
from engine.attention.cuda import CudaAttention
from engine.attention.interface import AttentionBackend
from engine.attention.probe import LayerKind
from engine.attention.reference import ReferenceAttention
from engine.attention.registered import NAME, register
from engine.attention.varlen import VarlenAttention
from engine.kernel_check import CHILD, NOT_HERE, ChildCheck, Here, check_here, kernel_check
from tests.devices.fake_device import TRAITS, FakeDevice

_LLAMA = LlamaConfig(
    vocab_size=5000, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=4999, layer_types=["full_attention"] * 3,
)  # fmt: skip
MODULES = {"config": json.loads(_LLAMA.to_json_string(use_diff=False)), "dtype": "float32"}


@pytest.fixture(autouse=True)
def children_find_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


class Checked:
    """A check by the fake child; `here` counts the checks in this process."""

    def __init__(self, folder: Path, versions: str = "driver 1", limit_s: float = 60.0) -> None:
        self.folder, self.ran, self.here = folder / "cache" / "kernels", folder / "ran", 0
        self._check = ChildCheck("fake:0", versions, self.folder, "tests.engine.fake_kernel_child", limit_s)

    def __call__(self, do: str, **params: Any) -> str | None:
        return self._check("attention", {"do": do, "ran": str(self.ran), **params}, self._here)

    @property
    def runs(self) -> int:
        return len(self.ran.read_text())

    def _here(self) -> str | None:
        self.here += 1
        return "as found here"


def test_good_kernels_are_checked_once_per_version(tmp_path: Path) -> None:
    check = Checked(tmp_path)

    assert [check("good"), check("good")] == [None, None]
    assert (check.runs, check.here) == (1, 0)

    assert check("good", block_size=32) is None
    assert Checked(tmp_path, "driver 2")("good") is None
    assert check.runs == 3
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in check.folder.iterdir())


@pytest.mark.parametrize(
    ("do", "why"),
    [
        ("wrong", "largest difference 3"),
        ("dies", "the check ended a child process with SIGKILL: CUDA error: an illegal memory access was encountered"),
        ("babbles", "the check ended a child process with exit status 0: no message"),
        ("lies", "the check ended a child process with exit status 0: no message"),
    ],
)
def test_bad_kernels_are_checked_at_each_start(do: str, why: str, tmp_path: Path) -> None:
    check = Checked(tmp_path)

    assert [check(do), check(do)] == [why, why]
    assert (check.runs, check.here) == (2, 0)


def test_a_check_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    check = Checked(tmp_path, limit_s=1.0)

    assert check("hangs") == "the check in a child process took more than 1 s"
    assert check.here == 0


def test_a_device_for_one_process_is_checked_here(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check = Checked(tmp_path)

    assert check("not here") == "as found here"

    (warning,) = [line.getMessage() for line in caplog.records]
    assert warning == (
        "kernels_checked_in_service check=attention device=fake:0 "
        'reason="RuntimeError: the device is busy or unavailable"'
    )


def test_a_folder_that_cannot_be_written_only_costs_the_next_check(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    check = Checked(tmp_path)

    assert [check("good"), check("good")] == [None, None]
    assert check.runs == 2


def test_only_accelerators_are_checked_in_a_child() -> None:
    devices = CpuDevice(), CudaDevice(CUDA, 0), object.__new__(NpuDevice)
    assert [one.checks_in_child for one in devices] == [False, True, True]
    assert kernel_check(FakeDevice()) is check_here
    check = kernel_check(FakeDevice(checks_in_child=True))
    assert isinstance(check, ChildCheck)
    assert check.child == CHILD
    assert "fake:0: tensors of the CPU" in check.versions
    assert torch.__version__.partition("+")[0] in check.versions


@pytest.mark.long
def test_the_child_computes_the_attention_of_its_device(tmp_path: Path) -> None:
    """In the model's kinds of layer, on a fake device with the attention of GPUs."""
    check = ChildCheck("fake:0", "", tmp_path, "tests.engine.fake_kernel_device")
    kind = LayerKind(4, 2, 16, 16, 0.25, sliding_window=7)
    params = {"place": 0, "kinds": [asdict(kind)], "block_size": 16, "dtype": "bfloat16"}

    assert check("attention", params, lambda: "not reached") is None
    assert list(tmp_path.iterdir())


class SomeLibrary(VarlenAttention):
    """Fails at its first step, so that the backend computes with torch instead."""

    def __init__(self) -> None:
        super().__init__(lambda *_, **__: torch.empty(0))

    def plan(self, metadata: Any) -> Any:
        def attend(*_: Any) -> torch.Tensor:
            raise RuntimeError("no kernel image is available")

        return SimpleNamespace(attend=attend)


def fail(error: Exception) -> Any:
    def raising(*_: Any, **__: Any) -> Any:
        raise error

    return raising


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({}, 0, '{"why": null}'),
        ({"check": "nucleus", "params": {}}, 0, '{"why": "TypeError: '),
        ({"check": "modules", "params": MODULES}, 0, '{"why": null}'),
        ({"check": "modules", "params": MODULES | {"config": {"model_type": "llama"}}}, NOT_HERE, "KeyError: "),
        ({"library": SomeLibrary}, 0, '{"why": "SomeLibrary: no kernel image is available"}'),
        ({"opens": fail(RuntimeError("busy"))}, NOT_HERE, "RuntimeError: busy"),
        ({"computes": fail(RuntimeError("CUDA out of memory. Tried"))}, NOT_HERE, "RuntimeError: CUDA out of memory."),
        ({"computes": fail(RuntimeError("misaligned\naddress"))}, 0, '{"why": "RuntimeError: misaligned address"}'),
    ],
    ids=["good", "bad-request", "modules", "no-layer", "library-fails", "busy", "no-memory", "fails"],
)
def test_the_childs_answer(
    changes: dict[str, Any],
    status: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("engine.attention.cuda._DTYPES", (torch.float32,))  # of SomeLibrary
    params = {"place": 0, "kinds": [asdict(LayerKind(4, 2, 16, 16, 0.25))], "block_size": 16, "dtype": "float32"}
    request = {"device": "fake:0", "check": "attention", "params": params}
    fields = {name: changes.get(name, value) for name, value in request.items()}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(fields)))
    monkeypatch.setattr(kernel_child, "signal_at_parent_end", lambda number: None)
    monkeypatch.setattr(kernel_child, "name_backends", lambda: None)
    device = FakeDevice(traits=replace(TRAITS, attention="cuda"))
    monkeypatch.setattr(kernel_child, "open_device", changes.get("opens", lambda name: device))
    if "library" in changes:
        chosen = (changes["library"](),), "a library"
        monkeypatch.setattr("engine.attention.cuda.choose_libraries", lambda device: chosen)
    if "computes" in changes:
        monkeypatch.setitem(kernel_child.CHECKS, "attention", changes["computes"])

    assert kernel_child.main() == status

    out, err = capsys.readouterr()
    assert (err if status else out).strip().splitlines()[-1].startswith(message)


def test_what_the_child_refuses_is_not_run(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    requests: list[int] = []
    flash = CudaAttention([VarlenAttention(lambda *_, **__: torch.empty(0))])

    def refuse_first(name: str, params: dict[str, Any], here: Here) -> str | None:
        requests.append(params["place"])
        return "SIGKILL" if params["place"] == 0 else None

    monkeypatch.setattr(backend_choice, "kernel_check", lambda device: refuse_first)
    monkeypatch.setattr(backend_choice, "layer_kinds", lambda network: ())
    backend, note = trusted(flash, None, FakeDevice(), block_size=16, dtype=torch.float32)

    assert requests == [0, 1]
    assert isinstance(backend, CudaAttention)
    assert backend.libraries == ()
    assert note is not None
    assert "SIGKILL" in note


def test_attention_on_gpus_has_alternatives_with_fewer_libraries() -> None:
    def library() -> VarlenAttention:
        return VarlenAttention(lambda *_, **__: torch.empty(0))

    plain: AttentionBackend = CudaAttention()
    assert with_alternatives(plain) == (plain,)
    assert with_alternatives(ReferenceAttention())[1:] == ()
    first, second = library(), library()
    others = with_alternatives(CudaAttention([first, second]))[1:]
    assert [one.libraries for one in others if isinstance(one, CudaAttention)] == [(second,), ()]


@pytest.mark.parametrize("why", [None, "the check ended a child process with SIGKILL: no message"])
def test_modules_that_a_child_did_not_survive_stay(
    why: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    requests: list[Any] = []

    def check(name: str, params: dict[str, Any], here: Here) -> str | None:
        requests.append((name, params))
        return why

    monkeypatch.setattr(device_modules, "kernel_check", lambda device: check)
    register()
    network = AutoModelForCausalLM.from_config(_LLAMA, dtype=torch.float32, attn_implementation=NAME).eval()
    before = network.model.norm.forward

    lines = device_modules.replace_modules(
        network, FakeDevice(traits=replace(TRAITS, attention="cuda"), checks_in_child=True)
    )  # fmt: skip

    ((name, params),) = requests
    assert (name, params) == ("modules", MODULES | {"config": MODULES["config"] | {"dtype": "float32"}})
    assert (network.model.norm.forward == before) == (why is not None)
    warnings = [line.getMessage() for line in caplog.records if "fallback" in line.getMessage()]
    if why is None:
        assert "norms" in lines[0]
        assert warnings == []
    else:
        assert lines == (f"all modules as in transformers, because the device's ops fail their check: {why}",)
        assert warnings == [f'modules_fallback device=fake:0 backend=transformers error="{why}"']
