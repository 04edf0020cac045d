"""Lines 83-88, 91, 95, 96 and 108 of the checklist: what `gen` writes for the guide's flags, as typed in the guide."""

import json
from pathlib import Path
from typing import Any

import pytest

from ranktable_tools import cli
from ranktable_tools.guide import main

IP = "10.0.0.18"


def _gen(folder: Path, *flags: str) -> int:
    return main(["--mode", "gen", "--ip", IP, "--save-dir", str(folder), *flags])


def _read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def _groups(folder: Path) -> dict[str, Any]:
    groups = _read(folder / f"global_ranktable_{IP}.json")["server_group_list"]
    return {group["group_id"]: group for group in groups}


@pytest.mark.covers("A7.83")
def test_the_save_dir_is_made_and_is_the_current_one_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert _gen(tmp_path / "a" / "b", "--prefill-server-list", "0") == 0
    assert main(["--mode", "gen", "--ip", IP, "--prefill-server-list", "0"]) == 0

    assert (tmp_path / "a" / "b" / f"global_ranktable_{IP}.json").exists()
    assert (tmp_path / f"global_ranktable_{IP}.json").exists()


@pytest.mark.covers("A7.84")
def test_api_server_adds_group_0_and_the_host_file(tmp_path: Path) -> None:
    _gen(tmp_path / "with", "--prefill-server-list", "4,5", "--api-server")
    _gen(tmp_path / "without", "--prefill-server-list", "4,5")

    assert list(_groups(tmp_path / "with")) == ["0", "1"]
    assert _groups(tmp_path / "with")["0"]["server_list"] == [{"server_id": IP, "server_ip": IP}]
    assert (tmp_path / "with" / f"local_ranktable_{IP}_host.json").exists()
    assert list(_groups(tmp_path / "without")) == ["1"]
    assert not (tmp_path / "without" / f"local_ranktable_{IP}_host.json").exists()


@pytest.mark.covers("A7.84")
def test_api_server_is_refused_by_merge(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--mode", "merge", "--api-server", "--global-ranktable-list", "a", "b"]) == 2
    assert "--api-server belongs to --mode gen, not to --mode merge" in capsys.readouterr().err


@pytest.mark.covers("A7.85")
def test_two_prefill_instances_are_two_local_files_in_order(tmp_path: Path) -> None:
    assert _gen(tmp_path, "--prefill-server-list", "6,7", "4,5") == 0

    servers = _groups(tmp_path)["1"]["server_list"]
    assert [[device["device_id"] for device in server["device"]] for server in servers] == [["6", "7"], ["4", "5"]]
    assert {path.name for path in tmp_path.glob("local_*")} == {
        f"local_ranktable_{IP}_67.json", f"local_ranktable_{IP}_45.json",
    }  # fmt: skip


def test_local_tables_of_an_earlier_gen_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = ("--prefill-server-list", "4,5", "--decode-server-list", "6,7", "--api-server")
    (tmp_path / "local_ranktable_10.0.0.99_01.json").write_text("{}")
    _gen(tmp_path, "--prefill-server-list", "2,3")
    part = capsys.readouterr().out

    _gen(tmp_path, *whole)
    _gen(tmp_path / "new", *whole)

    assert "an earlier gen" not in part  # tables of another host are left alone
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "an earlier gen" in line]
    assert note.endswith(": local_ranktable_10.0.0.18_23.json, local_ranktable_10.0.0.99_01.json")


@pytest.mark.covers("A7.86")
def test_a_host_may_have_decode_instances_alone(tmp_path: Path) -> None:
    assert _gen(tmp_path, "--decode-server-list", "0,1", "2,3") == 0

    assert list(_groups(tmp_path)) == ["2"]
    assert _groups(tmp_path)["2"]["server_count"] == "2"


@pytest.mark.covers("A7.88")
def test_files_have_the_guides_names(tmp_path: Path) -> None:
    assert _gen(tmp_path, "--prefill-server-list", "4,5", "--decode-server-list", "6,7", "--api-server") == 0

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"global_ranktable_{IP}.json",
        f"local_ranktable_{IP}_45.json",
        f"local_ranktable_{IP}_67.json",
        f"local_ranktable_{IP}_host.json",
    ]


@pytest.mark.covers("A11.17", "A7.88")
@pytest.mark.parametrize(("prefill", "decode"), [("1,23", "12,3"), ("1,0", "10")])
def test_two_files_of_one_name_are_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prefill: str, decode: str
) -> None:
    assert _gen(tmp_path / "out", "--prefill-server-list", prefill, "--decode-server-list", decode) == 2

    name = prefill.replace(",", "")
    assert f"local_ranktable_{IP}_{name}.json would be the file of both prefill-0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.covers("A7.91")
@pytest.mark.parametrize(
    "lists",
    [
        ("--prefill-server-list", "4,5", "--decode-server-list", "5,6"),
        ("--prefill-server-list", "4,5", "5,6"),
        ("--decode-server-list", "4,4"),
    ],
)
def test_a_device_used_twice_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lists: tuple[str, ...]
) -> None:
    assert _gen(tmp_path / "out", *lists) == 2

    words = "A device_id can be used only once in prefill server and decode server."
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.covers("A7.91")
@pytest.mark.parametrize(
    ("lists", "sizes"),
    [
        (("--prefill-server-list", "0,1", "2"), "2,1"),
        (("--decode-server-list", "0,1", "2"), "2,1"),
        (("--prefill-server-list", "0,1", "--decode-server-list", "2"), "2,1"),
    ],
)
def test_unequal_tensor_parallel_sizes_are_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lists: tuple[str, ...], sizes: str
) -> None:
    assert _gen(tmp_path, *lists) == 0
    assert f"Note: the instances differ in tensor-parallel-size, prefill first: {sizes}" in capsys.readouterr().out


@pytest.mark.covers("A7.95")
def test_ranks_count_from_0_and_device_ids_are_the_physical_ones(tmp_path: Path) -> None:
    assert _gen(tmp_path, "--prefill-server-list", "7,4,6") == 0

    devices = _groups(tmp_path)["1"]["server_list"][0]["device"]
    assert [(device["device_id"], device["rank_id"]) for device in devices] == [("7", "0"), ("4", "1"), ("6", "2")]


@pytest.mark.covers("A7.96")
def test_a_local_table_equals_its_entry_in_the_global_one(tmp_path: Path) -> None:
    assert _gen(tmp_path, "--prefill-server-list", "4,5", "--decode-server-list", "6,7", "--api-server") == 0

    groups = _groups(tmp_path)
    for group_id, ending in (("0", "host"), ("1", "45"), ("2", "67")):
        local = _read(tmp_path / f"local_ranktable_{IP}_{ending}.json")
        assert local.pop("server_list") == groups[group_id]["server_list"]
        assert local == {"version": "1.0", "status": "completed", "group_id": "0", "server_count": "1"}


@pytest.mark.covers("A11.19", "A8.108")
def test_ports_of_one_host_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lists = ["--prefill-server-list", "4,5", "--decode-server-list", "6,7", "--device-type", "cpu", "--ip", IP]

    assert cli.main(["gen", *lists, "--ports", "8088,8088", "--save-dir", str(tmp_path / "out")]) == 2

    assert "--ports has 8088 twice: 8088,8088; instances of one host need different ports" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert cli.main(["gen", *lists, "--ports", "8088,8089", "--save-dir", str(tmp_path)]) == 0
    ports = [_groups(tmp_path)[group]["server_list"][0]["server_port"] for group in ("1", "2")]
    assert ports == ["8088", "8089"]
