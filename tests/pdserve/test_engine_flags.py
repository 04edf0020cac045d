"""Wrong engine flags end `up` and `serve` before anything is started: exit status 2, one line with the value."""

from pathlib import Path

import pytest

from pdserve import cli, run_folder
from pdserve.engine_flags import check_engine_flags
from wire.options import EngineOptions, Parser, add_flags, from_namespace

WRONG = [
    (["--kv-transport", "hccl"], "--kv-transport 'hccl' is not one of cuda_ipc, shm, process_group, mooncake, tcp"),
    (["--kv-port-range", "20100-20000"], "--kv-port-range '20100-20000' must be FIRST-LAST with ports in 1..65535"),
    (["--kv-port-range", "x"], "--kv-port-range 'x' must be FIRST-LAST"),
    (["--kv-links", "0"], "--kv-links is 0, must be 1 to 64"),
    (["--block-size", "0"], "--block-size is 0, must be at least 1"),
    (["--device", "cuda"], "--device cuda: only the CPU backend exists so far"),
    (["--model", "/no/model", "--max-n", "0"], "--max-n 0 is out of range"),
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


TP_2 = ("--tensor-parallel-size", "2")
FAKE_TP_2 = ("--engine", "fake", *TP_2)
SHORT = [
    (2, "20000-20001", (), "has 2 ports: 3 ranks (3 instances x 1) take one each"),
    (3, "20000-20003", FAKE_TP_2, "has 4 ports: 8 ranks (4 instances x 2) take one each"),
    (3, "20000-20006", TP_2, "has 7 ports: 8 ranks (4 instances x 2) take one each"),
    (3, "20000-20002", ("--kv-transport", "shm", "process_group"), "has 3 ports: 4 ranks (4 instances x 1)"),
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
def test_a_range_with_a_port_for_each_rank_that_listens_on_one_is_enough(ports: str, flags: tuple[str, ...]) -> None:
    parser = Parser()
    add_flags(parser, EngineOptions, "engine")
    typed = parser.parse_args(["--kv-port-range", ports, *flags])

    check_engine_flags(from_namespace(EngineOptions, typed), instances=4)
