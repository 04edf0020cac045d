"""The table follows instances that move from node to node."""

from pathlib import Path

import pytest

from pdserve.ray_cluster.placements import Placements
from ranktable_tools.launch_plan import resolve
from ranktable_tools.table_file import read_global, read_local
from ranktable_tools.tables import TableDevice, TableServer
from wire.errors import ConfigError


def _server(ip: str, port: int, *device_ids: str) -> TableServer:
    return TableServer(ip, ip, tuple(TableDevice(one, ip, str(rank)) for rank, one in enumerate(device_ids)), port)


@pytest.fixture
def placements(tmp_path: Path) -> Placements:
    return Placements(["prefill-0", "decode-0", "decode-1"], "10.0.0.1", tmp_path)


def _place_all(placements: Placements) -> None:
    placements.set_entry("decode-1", _server("10.0.0.3", 22, "0"))
    placements.set_entry("prefill-0", _server("10.0.0.2", 20, "0", "1"))
    placements.set_entry("decode-0", _server("10.0.0.2", 21, "2"))


def test_there_is_no_table_before_all_are_placed(placements: Placements) -> None:
    placements.set_entry("decode-0", _server("10.0.0.2", 21, "2"))
    placements.set_entry("prefill-0", _server("10.0.0.2", 20, "0", "1"))

    assert placements.table() is None
    assert placements.write() is None
    assert not placements.path.exists()


def test_the_table_on_disk_is_the_one_that_all_processes_read(placements: Placements) -> None:
    _place_all(placements)

    assert placements.write() is not None
    table = read_global(str(placements.path))
    assert [one.name for one in table.instances] == ["prefill-0", "decode-0", "decode-1"]
    assert [one.server.server_port for one in table.instances] == [20, 21, 22]
    assert read_local(str(placements.scheduler_path)).server == table.scheduler
    environ = {
        "GLOBAL_RANK_TABLE_FILE_PATH": str(placements.path),
        "RANK_TABLE_FILE_PATH": str(placements.scheduler_path),
    }
    assert resolve(environ).role == "scheduler"
    assert placements.path.stat().st_mode & 0o777 == 0o600
    assert placements.text == placements.path.read_text()


def test_a_lost_instance_keeps_its_entry_until_it_is_placed_elsewhere(placements: Placements) -> None:
    _place_all(placements)
    placements.write()

    placements.lose("decode-0")
    assert placements.write() is None
    placements.set_entry("decode-0", _server("10.0.0.3", 30, "1"))

    assert placements.write() is not None
    servers = [one.server for one in read_global(str(placements.path)).instances[1:]]
    assert [(one.server_ip, one.server_port) for one in servers] == [("10.0.0.3", 30), ("10.0.0.3", 22)]


def test_a_restart_in_the_same_place_writes_nothing(placements: Placements) -> None:
    _place_all(placements)
    placements.write()

    placements.set_entry("decode-0", _server("10.0.0.2", 21, "2"))

    assert placements.write() is None


def test_taking_a_lost_instances_device_removes_its_entry(placements: Placements) -> None:
    _place_all(placements)
    placements.write()
    placements.lose("decode-0")
    placements.lose("decode-1")

    placements.set_entry("decode-1", _server("10.0.0.2", 40, "2"))

    placements.write()
    table = read_global(str(placements.path))
    assert [(one.server_ip, one.server_port) for one in table.decode] == [("10.0.0.2", 40)]


def test_the_file_is_kept_while_a_role_has_no_entry(placements: Placements) -> None:
    _place_all(placements)
    placements.write()
    before = placements.path.read_text()
    for name in ("prefill-0", "decode-0", "decode-1"):
        placements.lose(name)

    placements.set_entry("decode-0", _server("10.0.0.2", 20, "5"))  # prefill-0's port

    assert placements.table() is None
    assert placements.write() is None
    assert placements.path.read_text() == before


@pytest.mark.parametrize(
    ("server", "what"),
    [(_server("10.0.0.2", 50, "1"), "device 1"), (_server("10.0.0.2", 20, "7"), "port 20")],
)
def test_a_place_held_by_another_live_instance_is_refused(
    placements: Placements, server: TableServer, what: str
) -> None:
    _place_all(placements)

    with pytest.raises(ConfigError, match=f"decode-1 was given {what} of 10.0.0.2, which prefill-0 already has"):
        placements.set_entry("decode-1", server)
