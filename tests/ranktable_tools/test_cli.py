"""The command `ranktable`, from its arguments to files, output and exit status."""

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ranktable_tools import guide
from ranktable_tools.cli import main

IP = "10.0.0.18"
GEN = ["gen", "--prefill-server-list", "4,5", "--decode-server-list", "6,7", "--ip", IP, "--device-type", "cpu"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_both_lists_give_a_complete_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(GEN)

    out = capsys.readouterr().out
    assert status == 0
    assert _files(tmp_path) == [
        "cluster_secret",
        "global_ranktable_10.0.0.18.json",
        "local_ranktable_10.0.0.18_45.json",
        "local_ranktable_10.0.0.18_67.json",
        "local_ranktable_10.0.0.18_host.json",
    ]
    for name in _files(tmp_path):
        assert name in out
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    assert "Both lists were given, so the scheduler is on this host too (--no-api-server omits it)." in out
    assert out.count("PD_separate/start_servers.sh --model=MODEL") == 3
    assert "NODE_PORTS=8088,8089 sh " in out


def test_the_hosts_own_address_is_found(tmp_path: Path) -> None:
    status = main(["gen", "--prefill-server-list=4,5", "--decode-server-list=6,7", "--device-type=cpu"])

    assert status == 0
    (path,) = tmp_path.glob("global_ranktable_*.json")
    scheduler = json.loads(path.read_text())["server_group_list"][0]["server_list"][0]
    assert path.name == f"global_ranktable_{scheduler['server_ip']}.json"


@pytest.mark.parametrize("arguments", [GEN[:3] + GEN[5:], [*GEN, "--no-api-server"]])
def test_one_list_or_no_api_server_leaves_the_scheduler_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(arguments) == 0

    document = json.loads((tmp_path / f"global_ranktable_{IP}.json").read_text())
    assert "0" not in [group["group_id"] for group in document["server_group_list"]]
    assert not list(tmp_path.glob("*_host.json"))
    assert not (tmp_path / "cluster_secret").exists()
    assert "ranktable merge --global-ranktable-list" in capsys.readouterr().out


def test_api_server_with_one_list_or_none_writes_group_0(tmp_path: Path) -> None:
    assert main(["gen", "--api-server", "--ip", IP]) == 0
    assert main(["gen", "--api-server", "--decode-server-list", "1", "--ip", IP, "--save-dir", "d"]) == 0

    assert _files(tmp_path) == ["d", f"global_ranktable_{IP}.json", f"local_ranktable_{IP}_host.json"]
    document = json.loads((tmp_path / "d" / f"global_ranktable_{IP}.json").read_text())
    assert [group["group_id"] for group in document["server_group_list"]] == ["0", "2"]


def test_ports_are_in_the_tables_and_the_next_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["gen", "--prefill-server-list", "0", "1", "--decode-server-list", "2", "3", "--ip", IP]
    assert main([*arguments, "--ports", "9000,9002,9003,9004", "--device-type", "cpu"]) == 0

    groups = json.loads((tmp_path / f"global_ranktable_{IP}.json").read_text())["server_group_list"]
    assert [server["server_port"] for group in groups[1:] for server in group["server_list"]] == [
        "9000", "9002", "9003", "9004",
    ]  # fmt: skip
    output = capsys.readouterr().out
    assert "NODE_PORTS=9000,9002,9003,9004 " in output
    assert "--port=9001  # scheduler, the public port" in output


def test_the_next_steps_end_with_a_doctor_that_knows_the_ports(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(GEN) == 0

    assert capsys.readouterr().out.splitlines()[-1] == (
        f"  NODE_PORTS=8088,8089 ranktable doctor ./global_ranktable_{IP}.json"
    )


def test_instances_sharing_a_gpu_need_the_flag_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lists = ["--prefill-server-list", "0", "--decode-server-list", "0", "--ports", "8088,8089"]
    assert main(["gen", *lists, "--ip", IP, "--device-type", "cuda", "--share-devices"]) == 0

    *starts, _, examined = capsys.readouterr().out.splitlines()[-5:]
    assert [" --share-devices  # " in line for line in starts] == [True] * 3
    assert examined.startswith("  ranktable doctor --share-devices ")
    tables = [str(path) for path in tmp_path.glob("*ranktable*.json")]
    assert len(tables) == 4
    assert main(["lint", "--share-devices", *tables]) == 0
    assert main(["lint", *tables]) == 2


def test_a_second_gen_keeps_the_secret(tmp_path: Path) -> None:
    main(GEN)
    secret = (tmp_path / "cluster_secret").read_text()

    main(GEN)

    assert (tmp_path / "cluster_secret").read_text() == secret
    assert len(bytes.fromhex(secret)) == 32


def test_gen_keeps_its_tables_where_the_secret_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(GEN)
    before = (tmp_path / f"global_ranktable_{IP}.json").read_text()
    secret = tmp_path / "cluster_secret"
    secret.chmod(0o644)
    capsys.readouterr()

    assert main([*GEN, "--ports", "8088,8089"]) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "ranktable: cluster_secret has mode 0644, but others must have no access: chmod 600 cluster_secret\n"
    )
    assert (tmp_path / f"global_ranktable_{IP}.json").read_text() == before
    assert main([*GEN, "--no-api-server"]) == 0


@pytest.mark.parametrize("tool", [main, guide.main], ids=["ranktable", "pd_ranktable_tools"])
def test_the_empty_list_of_an_unset_variable_is_status_2_and_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tool: Callable[[list[str]], int]
) -> None:
    words = GEN[1:] if tool is guide.main else GEN

    assert tool([*words[: words.index("4,5")], "", *words[words.index("4,5") + 1 :]]) == 2

    assert "--prefill-server-list has '', an empty list; " in capsys.readouterr().err
    assert _files(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--decode-server-list", "5"], "A device_id can be used only once in prefill server and decode server."),
        (["--decode-server-list", "6,"], "Input format error. --decode-server-list has '6,'"),
        (["--prefill-server-list", "1,23", "--decode-server-list", "12,3"], "_123.json would be the file of both "),
        (["--ports", "8088"], "--ports has 1 port, but the instances need 2: 8088"),
        (["--ip", "10.**.**.18"], "--ip is '10.**.**.18'; that is a masked address: write the real one"),
        (["--device-type", "npu", "--share-devices"], "--share-devices is for GPUs: an NPU can only be in"),
        (["--device-type", "tpu"], "argument --device-type: invalid choice: 'tpu'"),
        (["--prefil-server-list", "1"], "unknown flag --prefil-server-list: did you mean --prefill-server-list?"),
    ],
)
def test_bad_input_is_one_line_status_2_and_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: list[str], message: str
) -> None:
    assert main([*GEN, *change]) == 2

    captured = capsys.readouterr()
    assert captured.err.startswith("ranktable: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert _files(tmp_path) == []


def test_a_save_dir_that_is_a_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()

    assert main([*GEN, "--save-dir", "file"]) == 2
    assert capsys.readouterr().err == "ranktable: --save-dir file: cannot be created: File exists\n"


def test_npu_addresses_are_read_from_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "hccn_tool"
    tool.write_text('#!/bin/sh\necho "ipaddr:10.20.0.$2"\necho "netmask:255.255.255.0"\n')
    tool.chmod(0o700)
    monkeypatch.setenv("HCCN_TOOL_PATH", str(tool))

    assert main([*GEN, "--device-type", "npu", "--save-dir", "out"]) == 0

    local = json.loads((tmp_path / "out" / f"local_ranktable_{IP}_67.json").read_text())
    devices = local["server_list"][0]["device"]
    assert [device["device_ip"] for device in devices] == ["10.20.0.6", "10.20.0.7"]


@pytest.mark.parametrize("requested", [["--worker", "vllm"], []])
def test_gen_lists_and_starts_workers_of_another_engine(
    requested: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_WORKER", "" if requested else "vllm")

    assert main([*GEN, *requested]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "start_servers.sh" in line]
    assert [" PDSERVE_WORKER=vllm sh " in line for line in lines] == [True, True, False]
    assert main(["lint", f"global_ranktable_{IP}.json"]) == 0


def test_show_lists_instances_and_connections(capsys: pytest.CaptureFixture[str]) -> None:
    main([*GEN, "--ports", "8088,8089"])
    capsys.readouterr()

    assert main(["show", f"global_ranktable_{IP}.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"global_ranktable_{IP}.json: modelarts, 1 prefill, 1 decode, digest ")
    assert lines[1:] == [
        "  clients",
        "   | HTTP",
        "  scheduler  10.0.0.18",
        "   |-- prefill 0   10.0.0.18 port 8088  devices 4,5",
        "   |-- decode 0    10.0.0.18 port 8089  devices 6,7",
        "  KV: prefill 0 ==> decode 0",
    ]


def test_a_closed_pipe_or_ctrl_c_prints_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(GEN)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", gone)
        assert main(["show", f"global_ranktable_{IP}.json"]) == 141

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ranktable_tools.show_command._show", interrupted)
    assert main(["show", f"global_ranktable_{IP}.json"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_show_recognises_parts_and_local_tables(capsys: pytest.CaptureFixture[str]) -> None:
    main([*GEN, "--no-api-server", "--save-dir", "d"])
    capsys.readouterr()

    main(["show", f"d/global_ranktable_{IP}.json"])
    main(["show", f"d/local_ranktable_{IP}_45.json"])

    out = capsys.readouterr().out
    assert "1 prefill, 1 decode, one host's table, to be merged" in out
    assert "modelarts, the table of one instance\n  10.0.0.18  devices 4,5" in out


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])

    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "ranktable gen --prefill-server-list 4,5 --decode-server-list 6,7" in out
    assert "ranktable merge --global-ranktable-list" in out


@pytest.mark.parametrize("arguments", [[], ["bake"], ["merge"], ["merge", "--global-ranktable-list", "a.json"]])
def test_a_wrong_command_line_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_gen_again_replaces_the_files_of_the_same_devices(tmp_path: Path) -> None:
    assert main(GEN) == 0
    (local,) = tmp_path.glob("local_*_45.json")
    before = local.stat().st_ino

    assert main(GEN) == 0

    assert local.stat().st_ino != before
