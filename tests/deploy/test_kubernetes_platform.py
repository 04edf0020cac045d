"""A platform's table is used unchanged: in place, or converted, and this pod is found in it."""

import json
import os
from pathlib import Path

import pytest

from ranktable_tools.dialects.dialect import ReadOptions
from ranktable_tools.errors import RanktableError
from ranktable_tools.kube.command_line import main
from ranktable_tools.kube.names import TABLE_FILE
from ranktable_tools.kube.platform_table import PlatformTable, convert_if_changed, node_ports, wait_for_platform
from ranktable_tools.kube.start import Start
from ranktable_tools.kube.waiting import WaitLimits
from ranktable_tools.launch_plan import resolve
from ranktable_tools.table_file import read_global
from ranktable_tools.tables import GlobalTable
from tests.deploy.slept_clock import SleptClock, no_lines
from tests.ranktable_tools.documents import A, B, C, Document, group, grouped, modelarts, server


def _file(folder: Path, document: Document) -> Path:
    path = folder / "global_rank_table.json"
    path.write_text(json.dumps(document))
    return path


def _wait(
    platform: PlatformTable, start: Start, clock: SleptClock | None = None, present: tuple[str, ...] = ()
) -> tuple[Path, Path, GlobalTable]:
    clock = clock or SleptClock()
    return wait_for_platform(platform, start, WaitLimits(70.0, no_lines, clock, clock.sleep), present)


def test_a_table_of_the_guides_form_is_read_in_place(tmp_path: Path) -> None:
    path = _file(tmp_path, modelarts())
    entry = read_global(str(path)).decode[0]
    start = Start("decode", entry.server_ip, tmp_path / "state")

    local, table, _ = _wait(PlatformTable(path), start, present=entry.device_ids)

    assert table == path
    plan = resolve({"GLOBAL_RANK_TABLE_FILE_PATH": str(table), "RANK_TABLE_FILE_PATH": str(local)})
    assert plan.name == "decode-0"
    assert not (tmp_path / "state" / TABLE_FILE).exists()


def test_one_of_another_dialect_is_converted_and_its_changes_followed(tmp_path: Path) -> None:
    groups = [group(0, server(A)), group(1, server(A, 0)), group(2, server(B, 0))]
    path, state = _file(tmp_path, grouped(*groups)), tmp_path / "state"
    platform = PlatformTable(path, 8088, "kubeinfer", ReadOptions(num_prefill=1))
    first = convert_if_changed(platform, state)
    written = first.stat().st_mtime_ns
    convert_if_changed(platform, state)
    same = first.stat().st_mtime_ns
    before = read_global(str(first))
    _file(tmp_path, grouped(*groups, group(3, server(C, 0))))
    convert_if_changed(platform, state)

    assert first == tmp_path / "state" / TABLE_FILE
    assert written == same
    after = read_global(str(first))
    assert [len(table.decode) for table in (before, after)] == [1, 2]
    assert {server.server_port for server in (*after.prefill, *after.decode)} == {8088}


def test_it_is_awaited_until_it_is_complete_and_has_this_pod(tmp_path: Path) -> None:
    path = tmp_path / "global_rank_table.json"

    def happens(now: float) -> None:
        if now >= 60:
            _file(tmp_path, modelarts(prefill=[server(A, 0)], decode=[server("10.0.0.7", 0)]))
        elif now >= 40:
            _file(tmp_path, modelarts(prefill=[server(A, 0)], decode=[server("10.0.0.8", 0)]))
        elif now >= 30:
            path.write_text('{"version": "1.0", "sta')
        elif now >= 20:
            _file(tmp_path, {"version": "1.0", "status": "initializing"})

    clock = SleptClock(happens)
    _wait(PlatformTable(path), Start("decode", "10.0.0.7", tmp_path / "s"), clock)

    assert 60 <= clock.now < 61


def test_a_table_that_never_comes_ends_the_wait_with_the_last_reason(tmp_path: Path) -> None:
    _file(tmp_path, {"version": "1.0", "status": "initializing"})
    start = Start("decode", "10.0.0.7", tmp_path / "s")

    with pytest.raises(RanktableError, match=r"table is not there after 70 s: .*status is 'initializing'"):
        _wait(PlatformTable(tmp_path / "global_rank_table.json"), start)


def test_a_table_with_a_mistake_is_not_waited_for(tmp_path: Path) -> None:
    path = _file(tmp_path, modelarts() | {"version": "9"})
    clock = SleptClock()

    with pytest.raises(RanktableError, match="version"):
        _wait(PlatformTable(path), Start("decode", A, tmp_path / "s"), clock)
    assert clock.now == 0


def test_two_instances_of_a_role_on_a_host_differ_by_devices(tmp_path: Path) -> None:
    path = _file(tmp_path, modelarts(prefill=[server(A, 0, 1), server(A, 2, 3)], decode=[server(B, 0)]))
    start = Start("prefill", A, tmp_path / "s")

    local, _, _ = _wait(PlatformTable(path), start, present=("2", "3"))

    devices = json.loads(local.read_text())["server_list"][0]["device"]
    assert [device["device_id"] for device in devices] == ["2", "3"]
    with pytest.raises(
        RanktableError, match=r"2 prefill instances at .*devices 0,1 and 2,3, but this container has none"
    ):
        _wait(PlatformTable(path), start)


def test_ports_missing_in_a_platforms_table_are_the_instances_own(tmp_path: Path) -> None:
    bare = read_global(str(_file(tmp_path, modelarts(prefill=[server(A, 0)], decode=[server(B, 0)]))))
    entry = server(A, 0) | {"server_port": "8088"}
    ported = read_global(str(_file(tmp_path, modelarts(prefill=[entry], decode=[server(B, 0)]))))

    assert (node_ports(bare, 8088), node_ports(ported, 8088)) == ("8088,8088", None)


def test_the_scheduler_gets_their_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported = list[tuple[str, list[str], dict[str, str]]]()
    monkeypatch.setattr(os, "execvpe", lambda *words: reported.append(words))
    path = _file(tmp_path, modelarts(prefill=[server(A, 0)], decode=[server(B, 0)]))
    ip = read_global(str(path)).scheduler.server_ip
    flags = ["--role", "scheduler", "--ip", ip, "--folder", str(tmp_path / "s"), "--port", "8088", "--table", str(path)]

    assert main(["start", *flags, "--", "true"]) == 0

    environ = reported[0][2]
    assert environ["NODE_PORTS"] == "8088,8088"
    assert [address.port for address in resolve(environ).instance_addresses] == [8088, 8088]
