"""Wrong engine flags end `up` and `serve` before anything is started: exit status 2, one line with the value."""

from pathlib import Path

import pytest

from flags.options import EngineOptions, Parser, add_flags, from_namespace
from pdserve import cli, run_folder
from pdserve.engine_flags import check_engine_flags
from pdserve.model_flags import check_model
from pdserve.ports import free_ports

WRONG = [
    (
        ["--kv-transport", "rdma"],
        "'rdma' is not one of cuda_ipc, shm, mooncake, process_group, tcp, ascend, gloo, nccl, hccl",
    ),
    (["--kv-port-range", "20100-20000"], "--kv-port-range '20100-20000' must be FIRST-LAST with 1 <= FIRST"),
    (["--kv-port-range", "x"], "--kv-port-range 'x' must be FIRST-LAST"),
    (["--kv-links", "0"], "--kv-links is 0, but must be 1 to 64"),
    (["--block-size", "0"], "--block-size is 0, but must be at least 1"),
    (["--device", "npu"], "--device npu: torch_npu is not installed: run scripts/install"),
    (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
    (["--model", "/no/model", "--max-n", "0"], "--max-n 0 is out of range"),
    (["--model", ""], "--model '' is empty, as from an unset variable"),
]


@pytest.mark.parametrize("command", ["up", "serve"])
@pytest.mark.parametrize(("flags", "words"), WRONG)
def test_a_wrong_flag_ends_the_command_where_it_was_typed(
    command: str, flags: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("PDSERVE_RUN_DIR", str(tmp_path))

    assert cli.main([command, *flags]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"pdserve {command}: ")
    assert words in line
    assert run_folder.RunFolder(tmp_path).read() is None


@pytest.mark.parametrize(
    ("config", "flags", "words"),
    [
        (None, (), "/model/config.json is missing"),
        ("{", (), "/model/config.json cannot be read as JSON"),
        ('{"max_position_embeddings": 64}', ("--max-model-len", "65"), "--max-model-len 65 exceeds 64, the limit in "),
        ('{"text_config": {"max_position_embeddings": 64}}', ("--max-model-len", "65"), "exceeds 64, the limit in "),
    ],
)
def test_a_model_that_cannot_be_served_ends_up_before_anything_starts(
    config: str | None, flags: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("PDSERVE_RUN_DIR", str(tmp_path / "run"))
    (tmp_path / "model").mkdir()
    if config is not None:
        (tmp_path / "model" / "config.json").write_text(config)

    assert cli.main(["up", "--port", str(free_ports(1)[0]), "--model", str(tmp_path / "model"), *flags]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert not (tmp_path / "run").exists()


def test_a_missing_model_ends_up_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDSERVE_RUN_DIR", str(tmp_path / "run"))

    assert cli.main(["up", "--port", str(free_ports(1)[0]), "--model", "/no/model"]) == 2

    assert capsys.readouterr().err == "pdserve up: --model /no/model is not a folder\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rope", ['"rope_scaling"', '"rope_parameters"'])
def test_a_length_that_rope_scaling_may_allow_is_left_to_instances(rope: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"max_position_embeddings": 64, {rope}: {{"rope_type": "dynamic"}}}}')
    check_model(EngineOptions(model=str(tmp_path), max_model_len=65))
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    check_model(EngineOptions(model=str(tmp_path), max_model_len=65, engine="fake"))
    check_model(EngineOptions(model=str(tmp_path), max_model_len=64))


TP_2 = ("--tensor-parallel-size", "2")
FAKE_TP_2 = ("--engine", "fake", *TP_2)
SHORT = [
    (2, "20000-20001", (), "has 2 ports, but 3 ranks need one each (instances: 3, ranks of each: 1)"),
    (3, "20000-20003", FAKE_TP_2, "has 4 ports, but 8 ranks need one each (instances: 4, ranks of each: 2)"),
    (3, "20000-20006", TP_2, "has 7 ports, but 8 ranks need one each (instances: 4, ranks of each: 2)"),
    (3, "20000-20002", ("--kv-transport", "shm", "process_group"), "has 3 ports, but 4 ranks need one each"),
]
ENOUGH = [
    ("20000-20003", ()),
    ("20000-20007", FAKE_TP_2),
    ("20000-20007", TP_2),
    ("20000-20000", ("--kv-transport", "shm")),
    ("20000-20000", ("--kv-transport", "cuda_ipc", "shm")),
]


@pytest.mark.parametrize(("num_decode", "ports", "flags", "words"), SHORT)
def test_a_range_with_too_few_ports_for_the_ranks_is_refused(
    num_decode: int, ports: str, flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["up", "--decode", str(num_decode), "--kv-port-range", ports, *flags]) == 2

    assert f"--kv-port-range '{ports}' {words}" in capsys.readouterr().err


@pytest.mark.parametrize(("ports", "flags"), ENOUGH)
def test_a_port_range_needs_one_port_per_listening_rank(ports: str, flags: tuple[str, ...]) -> None:
    parser = Parser()
    add_flags(parser, EngineOptions, "engine")
    typed = parser.parse_args(["--kv-port-range", ports, *flags])

    check_engine_flags(from_namespace(EngineOptions, typed), instances=4)


def test_serve_uses_no_default_for_an_empty_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", ""]) == 2

    assert capsys.readouterr().err.startswith("pdserve serve: MODEL '' is empty, as from an unset variable")
