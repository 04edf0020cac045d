"""Local tables joined into one instance over several servers."""

import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranktable_tools import cli, guide
from ranktable_tools.errors import RanktableError
from ranktable_tools.launch_plan import resolve
from ranktable_tools.merge_local import NamedInstance, merge_local
from ranktable_tools.tables import TableDevice, TableInstance, TableServer
from tests.examples import examples
from tests.ranktable_tools.documents import A, B, C, local, modelarts, server

Save = Callable[[str, object], str]
Say = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_ranks_continue_over_all_servers_in_argument_order(save: Save, capsys: Say) -> None:
    files = [save("b.json", local(server(B, 6, 7))), save("a.json", local(server(A, 4, 5)))]

    assert cli.main(["merge-local", "--local-ranktable-list", *files, "--save-dir", "out"]) == 0

    path = Path("out/local_ranktable_merge.json")
    assert json.loads(path.read_text()) == local(server(B, 6, 7), server(A, 4, 5, first_rank=2))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "pdserve cannot start it" in capsys.readouterr().out


def test_ranks_keep_their_order_within_a_table(save: Save) -> None:
    turned = server(A, 4, 5)
    turned["device"][0]["rank_id"], turned["device"][1]["rank_id"] = "1", "0"
    files = [save("a.json", local(turned)), save("b.json", local(server(B, 6)))]

    assert cli.main(["merge-local", "--local-ranktable-list", *files]) == 0

    (first, second) = json.loads(Path("local_ranktable_merge.json").read_text())["server_list"]
    assert [(entry["device_id"], entry["rank_id"]) for entry in first["device"]] == [("5", "0"), ("4", "1")]
    assert [(entry["device_id"], entry["rank_id"]) for entry in second["device"]] == [("6", "2")]


def test_the_guides_tool_does_it_with_the_guides_messages(save: Save, capsys: Say) -> None:
    files = [save("a.json", local(server(A, 0))), save("b.json", local(server(B, 0)))]

    assert guide.main(["--mode", "merge-local", "--local-ranktable-list", *files]) == 0

    output = capsys.readouterr().out
    assert "-INFO: Save ./local_ranktable_merge.json\n" in output
    assert "-INFO: Merge 2 local ranktable successful.\n" in output


def test_the_devices_of_one_host_are_one_entry(save: Save) -> None:
    files = [save(f"{number}.json", local(server(ip, number))) for number, ip in enumerate((A, B, A))]

    assert cli.main(["merge-local", "--local-ranktable-list", *files]) == 0

    merged = json.loads(Path("local_ranktable_merge.json").read_text())
    assert [(entry["server_ip"], len(entry["device"])) for entry in merged["server_list"]] == [(A, 2), (B, 1)]
    assert cli.main(["lint", "local_ranktable_merge.json"]) == 0


def test_a_merged_table_can_be_merged_again(save: Save) -> None:
    files = [save(f"{number}.json", local(server(ip, number))) for number, ip in enumerate((A, B, C))]
    assert cli.main(["merge-local", "--local-ranktable-list", *files[:2], "--save-dir", "two"]) == 0

    assert cli.main(["merge-local", "--local-ranktable-list", "two/local_ranktable_merge.json", files[2]]) == 0

    merged = json.loads(Path("local_ranktable_merge.json").read_text())
    assert merged["server_count"] == "3"
    assert [entry["device"][0]["rank_id"] for entry in merged["server_list"]] == ["0", "1", "2"]


def test_our_own_instance_over_servers_is_refused_at_start(save: Save) -> None:
    files = [save("a.json", local(server(A, 0))), save("b.json", local(server(B, 0)))]
    assert cli.main(["merge-local", "--local-ranktable-list", *files]) == 0

    with pytest.raises(RanktableError) as caught:
        resolve({
            "GLOBAL_RANK_TABLE_FILE_PATH": save("g.json", modelarts()),
            "RANK_TABLE_FILE_PATH": "local_ranktable_merge.json",
        })  # fmt: skip

    assert str(caught.value) == (
        f"RANK_TABLE_FILE_PATH: local_ranktable_merge.json: server_list has 2 servers, {A} and {B}; must have 1, "
        "because pdserve cannot start an instance over several servers: write a local table for each server "
        "(tables of merge-local are for other tools)"
    )


@pytest.mark.parametrize(
    ("mode", "flag"), [("merge-local", "--global-ranktable-list"), ("merge", "--local-ranktable-list")]
)
def test_a_list_of_the_other_mode_is_refused(capsys: Say, mode: str, flag: str) -> None:
    other = "merge" if mode == "merge-local" else "merge-local"

    assert guide.main(["--mode", mode, flag, "a", "b"]) == 2
    assert f"{flag} belongs to --mode {other}, not to --mode {mode}" in capsys.readouterr().err


@examples(40)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 4)), min_size=2, max_size=6, unique_by=lambda s: s[0])
)
def test_no_device_is_lost_and_ranks_run_from_0(sizes: list[tuple[int, int]]) -> None:
    parts = [
        TableInstance(None, (TableServer(ip, ip, tuple(TableDevice(str(n), f"{ip}{n}", str(n)) for n in range(size))),))
        for host, size in sizes
        for ip in (f"192.0.2.{host}",)
    ]

    table = merge_local([NamedInstance(f"{number}.json", part) for number, part in enumerate(parts)])

    merged = table.instances[0].devices
    assert [device.device_ip for device in merged] == [device.device_ip for part in parts for device in part.devices]
    assert [device.rank_id for device in merged] == [str(rank) for rank in range(len(merged))]
