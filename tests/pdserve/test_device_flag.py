"""--device reaches the engine by every command that loads a model, and no device's package is imported unasked."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from devices.table import KINDS
from pdserve import LLM, SamplingParams, combined, launch
from pdserve.bench.cases import BenchCase, BenchRun
from pdserve.bench.pd.command import _contestants
from pdserve.bench.pd.options import PdRequest
from pdserve.bench.pd.options import parse as parse_bench_pd
from pdserve.cli import main
from pdserve.entrypoints.openai import api_server
from pdserve.layout import ClusterShape, lay_out
from pdserve.ports import free_ports
from pdserve.up_request import UpRequest
from pdserve.up_request import parse as parse_up
from tests.devices.fake_device import TRAITS, FakeKind
from tests.engine.tiny_models import make_tiny_model
from wire.errors import ConfigError

WHY = "nobody plugged one in"
SAID = f"--device cuda: {WHY}"
CARD = replace(TRAITS, kind="cuda", visible_variable="CUDA_VISIBLE_DEVICES")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model("llama", tmp_path / "tiny")


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "cuda", FakeKind(CARD, why=WHY))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "cuda", FakeKind(CARD))


def serve(folder: Path, flags: Sequence[str]) -> int:
    return main(["serve", str(folder), *flags])


def api(folder: Path, flags: Sequence[str]) -> int:
    before, sys.argv = sys.argv, ["api_server", "--model", str(folder), *flags]
    try:
        return api_server.main()
    finally:
        sys.argv = before


def one_combined(folder: Path, flags: Sequence[str]) -> int:
    return combined.main(["--model", str(folder), *flags])


@pytest.mark.usefixtures("no_card")
@pytest.mark.parametrize("start", [serve, api, one_combined])
def test_serving_commands_open_the_device(
    start: Callable[[Path, Sequence[str]], int], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (port,) = free_ports(1)

    assert start(model, ["--port", str(port), "--device", "cuda"]) == 2
    assert SAID in capsys.readouterr().err


@pytest.mark.parametrize("start", [serve, lambda folder, flags: main(["up", "--model", str(folder), *flags])])
@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("auto", "--attention-backend npu: no npu card is visible here"),
        ("cpu", "--attention-backend 'npu' is not one of auto, cpu, reference, the backends of --device cpu"),
    ],
)
def test_a_device_without_its_attention_backend_is_refused_first(
    start: Callable[[Path, Sequence[str]], int], device: str, words: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(KINDS, "npu", FakeKind(replace(TRAITS, kind="npu", attention="npu"), shown=False))

    assert start(tmp_path / "there is none", ["--attention-backend", "npu", "--device", device]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.usefixtures("no_card")
def test_an_instance_of_a_ranktable_opens_the_device(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (port,) = free_ports(1)
    flags = ("--model", str(model), "--device", "cuda")
    plan = lay_out(ClusterShape(1, 1, "127.0.0.1", port, flags, "cuda"), tmp_path / "tables")[0]
    for name, value in {**plan.env, "CUDA_VISIBLE_DEVICES": "0"}.items():
        monkeypatch.setenv(name, value)

    assert launch.main(plan.command[plan.command.index("--host") :]) == 2
    out, err = capsys.readouterr()
    assert SAID in err
    assert "devices: rank 0 = device 0 on 0 (CUDA_VISIBLE_DEVICES=0, already set)" in out


@pytest.mark.usefixtures("card")
def test_up_and_bench_pd_pass_it_to_every_process(model: Path, tmp_path: Path) -> None:
    up = parse_up(["--model", str(model), "--device", "cuda"])
    bench = parse_bench_pd(["--model", str(model), "--device", "cuda"])
    shape = ClusterShape(1, 1, "127.0.0.1", 9000, up.flags)

    for flags in (up.flags, bench.flags, *(plan.command for plan in lay_out(shape, tmp_path / "tables"))):
        place = flags.index("--device")
        assert flags[place + 1] == "cuda"


@pytest.mark.usefixtures("card")
def test_bench_pds_contestants_get_the_selected_devices_cards(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    request = parse_bench_pd(["--model", str(model), "--device", "cuda"])

    for contestant in _contestants(request, tmp_path):
        cards = [plan.env.get("CUDA_VISIBLE_DEVICES") for plan in contestant.plans]
        assert cards == ["2", "3", None], contestant.name


@pytest.mark.parametrize("parse", [parse_up, parse_bench_pd], ids=["up", "bench-pd"])
def test_auto_uses_the_cpu_with_a_message_if_no_card_is_visible(
    parse: Callable[[Sequence[str]], UpRequest | PdRequest], model: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("pdserve.card_shortage.find_kind", lambda dev: "cuda")

    request = parse(["--model", str(model)])

    why = "there are more ranks (2) than cards in CUDA_VISIBLE_DEVICES (0)"
    assert f"--device auto: all instances run on the CPU, because {why}\n" in capsys.readouterr().err
    assert request.flags[request.flags.index("--device") + 1] == "cpu"
    if isinstance(request, PdRequest):
        plans = [plan for contestant in _contestants(request, tmp_path) for plan in contestant.plans]
        assert {plan.env.get("CUDA_VISIBLE_DEVICES") for plan in plans} == {None}


@pytest.mark.usefixtures("no_card")
def test_a_batch_opens_the_device(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"model": str(model), "prompt": "hello", "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]

    status = main(["run-batch", *files, "--model", str(model), "--device", "cuda"])

    assert status != 0
    assert SAID in capsys.readouterr().err


@pytest.mark.usefixtures("no_card")
@pytest.mark.parametrize("command", [["bench", "engine"], ["selftest"]])
def test_bench_and_selftest_open_the_device(
    command: list[str], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", str(model)] if command == ["bench", "engine"] else []

    assert main([*command, "--device", "cuda", *flags]) == 2
    assert SAID in capsys.readouterr().err


@pytest.mark.usefixtures("card")
def test_the_engine_bench_measures_on_the_device(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.bench.engine.KV_BYTES", 16 << 20)
    monkeypatch.setattr("pdserve.bench.floors._READ_BYTES", 1 << 20)
    monkeypatch.setattr(
        "pdserve.bench.engine.all_cases", lambda: [BenchCase("prefill 1 x 16", BenchRun(1, 16, 1), None)]
    )

    status = main(["bench", "engine", "--model", str(model), "--device", "cuda", "--only", "1 x 16", "--repeats", "1"])

    setup = json.loads(capsys.readouterr().out.splitlines()[0])
    assert status == 0
    assert setup["notes"][0] == "device cuda, as requested (cuda:0: tensors of the CPU)"


@pytest.mark.usefixtures("no_card")
def test_llm_opens_the_device(model: Path) -> None:
    with pytest.raises(ConfigError, match=f"device cuda: {WHY}"):
        LLM(str(model), device="cuda")


@pytest.mark.long
@pytest.mark.usefixtures("card")
def test_llm_computes_on_the_device(model: Path) -> None:
    with LLM(str(model), device="cuda", dtype="float32", kv_cache_memory="4MiB") as llm:
        on_card = llm.generate("hello", SamplingParams(max_tokens=8, temperature=0))[0].outputs[0].token_ids
    with LLM(str(model), device="cpu", dtype="float32", kv_cache_memory="4MiB") as llm:
        on_cpu = llm.generate("hello", SamplingParams(max_tokens=8, temperature=0))[0].outputs[0].token_ids

    assert list(on_card) == list(on_cpu)


def broken_torch_npu(folder: Path) -> dict[str, str]:
    """Install a torch_npu without CANN; return the environment of a process that uses it."""
    info = folder / "torch_npu-2.13.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\nRequires-Dist: torch==2.13.*\n"
    )
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    (folder / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')\n")
    left = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    return {**left, "PYTHONPATH": os.pathsep.join([str(folder), os.getcwd()])}


def child(environ: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", *command], env=environ, capture_output=True, text=True, timeout=300, check=False
    )


LOOKS = """
import ctypes, sys
load = ctypes.CDLL
ctypes.CDLL = lambda name, *more, **options: print("loads", name) or load(name, *more, **options)
from pdserve.cli import main
main(sys.argv[1:])
if "import torch" in sys.argv:
    import torch
"""


@pytest.mark.often("--version-False", "status-False")
@pytest.mark.parametrize(("argument", "looks"), [("--version", False), ("status", False), ("import torch", True)])
def test_a_command_looks_for_cann_only_when_it_imports_torch(argument: str, looks: bool, tmp_path: Path) -> None:
    environ = {**broken_torch_npu(tmp_path / "site"), "TMPDIR": str(tmp_path), "HOME": str(tmp_path)}

    ran = child(environ, "-c", LOOKS, argument)

    assert ("loads libascendcl.so" in ran.stdout) is looks, ran.stderr


@pytest.mark.long
def test_a_torch_npu_without_cann_ends_no_run_on_the_cpu(tmp_path: Path) -> None:
    """transformers imports what is installed, too: the model is loaded and compared."""
    environ, report = broken_torch_npu(tmp_path / "site"), tmp_path / "report.md"
    selftest = ("-m", "pdserve", "selftest", "--only", "combined", "--report", str(report))

    plain = child(environ, "-c", "import torch")
    model = child({**environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "-c", "from transformers.integrations import moe")
    ours = child(environ, *selftest)
    requested = child(environ, *selftest, "--device", "npu")

    assert plain.returncode != 0
    assert "libhccl.so" in plain.stderr
    assert "libhccl.so" in model.stderr
    assert (ours.returncode, ours.stdout.splitlines()[0].partition(":")[0]) == (0, "device cpu")
    assert requested.returncode == 2
    (line,) = requested.stderr.splitlines()
    assert "--device npu: torch_npu 2.13.0 cannot be imported; CANN is missing or does not match: libhccl.so" in line
    assert line.endswith("torch_npu 2.13.0)")
