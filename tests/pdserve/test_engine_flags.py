"""Wrong engine flags end `up` and `serve` before anything is started: exit status 2, one line with the value."""

from pathlib import Path

import pytest

from pdserve import cli, run_folder

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


def test_a_range_with_too_few_ports_for_the_instances_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["up", "--decode", "2", "--kv-port-range", "20000-20001"]) == 2
    assert "--kv-port-range '20000-20001' has 2 ports: 3 instances take one each" in capsys.readouterr().err
