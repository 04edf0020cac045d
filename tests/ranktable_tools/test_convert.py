"""Tables of other dialects become tables that pdserve can start from, and the guide's become HCCL's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ranktable_tools.cli import main
from ranktable_tools.launch_plan import resolve
from tests.ranktable_tools.documents import (
    A,
    B,
    C,
    Document,
    device,
    group,
    grouped,
    hccl,
    hccl_1_2,
    kubeinfer,
    local,
    mindie,
    modelarts,
    omni_merged,
    pod,
    server,
    vllm_ascend,
)

Save = Callable[[str, object], str]
Say = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _converted(save: Save, capsys: Say, document: object, *flags: str) -> tuple[dict[str, Any], str]:
    """Return what is printed, and the notes."""
    assert main(["convert", save("t.json", document), *flags]) == 0
    captured = capsys.readouterr()
    printed: dict[str, Any] = json.loads(captured.out)
    return printed, captured.err


def _server_devices(table: dict[str, Any]) -> list[tuple[str, str, list[str]]]:
    return [
        (entry["group_id"], member["server_ip"], [listed["device_id"] for listed in member.get("device", [])])
        for entry in table["server_group_list"]
        for member in entry["server_list"]
    ]


def test_kubeinfers_table_becomes_the_guides(save: Save, capsys: Say) -> None:
    document = grouped(group(0, server(A)), *(group(n, server(ip, 0, 1)) for n, ip in ((1, A), (2, B), (3, C))))

    table, notes = _converted(save, capsys, document, "--to", "modelarts", "--num-prefill", "2")

    assert _server_devices(table) == [("0", A, []), ("1", A, ["0", "1"]), ("1", B, ["0", "1"]), ("2", C, ["0", "1"])]
    assert notes == ""


def test_merge_alls_table_gets_a_scheduler(save: Save, capsys: Say) -> None:
    table, _ = _converted(save, capsys, omni_merged(), "--to", "modelarts", "--num-prefill", "1", "--api-server", C)

    assert _server_devices(table) == [("0", C, []), ("1", A, ["0", "1"]), ("2", A, ["2", "3"]), ("2", B, ["0", "1"])]


def test_vllm_ascends_devices_become_instances_and_losses_are_named(save: Save, capsys: Say) -> None:
    table, notes = _converted(save, capsys, vllm_ascend(), "--to", "modelarts", "--api-server", A)

    assert _server_devices(table) == [("0", A, []), ("1", A, ["0", "1"]), ("2", B, ["0"]), ("2", C, ["0"])]
    assert "note: super_device_id (4x) is left out: modelarts has no place for it\n" in notes
    assert "note: super_pod_id (3x) is left out: modelarts has no place for it\n" in notes
    assert "note: the table has devices, not instances: the devices of one role and server become one" in notes


def test_mindies_instance_over_two_hosts_becomes_hccls_table(save: Save, capsys: Say) -> None:
    table, notes = _converted(save, capsys, mindie(), "--to", "hccl-1.2", "--instance", "instance-0")

    assert [(entry["server_id"], len(entry["device"])) for entry in table["server_list"]] == [(A, 2), (B, 2)]
    ranks = [listed["rank_id"] for entry in table["server_list"] for listed in entry["device"]]
    assert ranks == ["0", "1", "2", "3"]
    assert table["super_pod_list"] == [pod("0", A, B)]
    assert "note: device_logical_id (4x) is left out: hccl-1.2 has no place for it" in notes


def test_unknown_keys_are_named(save: Save, capsys: Say) -> None:
    document = {**modelarts(), "hardware_type": "800I-A2-32G"}
    for entry in document["server_group_list"][1:]:
        entry["server_list"][0]["predict_port"] = "1025"

    _, notes = _converted(save, capsys, document, "--to", "modelarts")

    assert notes.splitlines() == [
        "note: predict_port (2x) is left out: it is not read",
        "note: hardware_type (1x) is left out: it is not read",
    ]


def test_one_instance_of_the_guides_table_becomes_hccls(save: Save, capsys: Say) -> None:
    table, notes = _converted(save, capsys, modelarts(), "--to", "hccl-1.0", "--instance", "decode-0")

    assert table == hccl(server(B, 6, 7))
    assert notes == ""


def test_hccl_with_super_pods_becomes_hccl_without(save: Save, capsys: Say) -> None:
    table, notes = _converted(save, capsys, hccl_1_2(), "--to", "hccl-1.0")

    assert table["version"] == "1.0"
    assert "super_pod_list" not in table
    assert [entry["container_ip"] for entry in table["server_list"]] == ["203.0.113.1", "203.0.113.2"]
    assert "super_device_id (4x)" in notes


def test_hccls_servers_of_one_host_become_one(save: Save, capsys: Say) -> None:
    """A README renames the servers of one host; HCCL requires the host's devices in one entry."""
    document = local({**server(A, 0), "server_id": "server-0"}, {**server(A, 1, first_rank=1), "server_id": "server-1"})

    table, _ = _converted(save, capsys, document, "--to", "hccl-1.0")

    (entry,) = table["server_list"]
    assert [listed["device_id"] for listed in entry["device"]] == ["0", "1"]


@pytest.mark.parametrize("names", [("localhost", "localhost"), ("a", "b" * 65)])
def test_ids_that_hccl_refuses_become_addresses(save: Save, capsys: Say, names: tuple[str, str]) -> None:
    first, second = server(A, 0), server(B, 0, first_rank=1)
    document = local({**first, "server_id": names[0]}, {**second, "server_id": names[1]})

    table, _ = _converted(save, capsys, document, "--to", "hccl-1.0")

    assert [entry["server_id"] for entry in table["server_list"]] == [A, B]


def test_localhost_by_any_name_is_one_server_of_hccl(save: Save, capsys: Say) -> None:
    entries = [server("localhost", 0), server("127.0.0.1", 1, first_rank=1)]

    table, _ = _converted(save, capsys, local(*entries), "--to", "hccl-1.0")

    assert [len(entry["device"]) for entry in table["server_list"]] == [2]


def test_servers_of_one_super_pod_are_written_together(save: Save, capsys: Say) -> None:
    entries = [server(ip, 0, first_rank=rank) for rank, ip in enumerate((A, B, C))]
    for rank, entry in enumerate(entries):
        entry["device"][0]["super_device_id"] = str(rank)
    spread = group(2, *entries, super_pod_list=[pod("0", A, C), pod("1", B)], deploy_server="0")

    table, _ = _converted(
        save, capsys, grouped(group(0, server(A)), group(1, server(A)), spread), "--to", "hccl-1.2", "--instance",
        "instance-0",
    )  # fmt: skip

    assert [entry["server_id"] for entry in table["server_list"]] == [A, C, B]


def test_an_hccl_table_of_one_server_becomes_a_part_with_a_role(save: Save, capsys: Say) -> None:
    table, _ = _converted(save, capsys, hccl(server(B, 6, 7)), "--to", "modelarts", "--role", "decode")

    assert _server_devices(table) == [("2", B, ["6", "7"])]


def test_a_folder_gets_every_table_and_processes_start_from_it(save: Save, capsys: Say, tmp_path: Path) -> None:
    document = grouped(group(0, server(A)), *(group(n, server(ip, 0, 1)) for n, ip in ((1, B), (2, C), (3, A))))

    status = main(
        ["convert", save("t.json", document), "--to", "modelarts", "--num-prefill", "2", "--save-dir", "tables"]
    )

    files = sorted(path.name for path in Path("tables").iterdir())
    assert status == 0
    assert files == [
        f"global_ranktable_{A}.json",
        f"local_ranktable_{A}_01.json",
        f"local_ranktable_{A}_host.json",
        f"local_ranktable_{B}_01.json",
        f"local_ranktable_{C}_01.json",
    ]
    roles = []
    for name in files[1:]:
        environ = {
            "GLOBAL_RANK_TABLE_FILE_PATH": f"tables/{files[0]}",
            "RANK_TABLE_FILE_PATH": f"tables/{name}",
            "NODE_PORTS": "8088,8089,8090",
        }
        roles.append(resolve(environ).role)
    assert roles == ["decode", "scheduler", "prefill", "prefill"]
    assert main(["lint", *(f"tables/{name}" for name in files)]) == 0


def test_a_folder_gets_an_hccl_table_of_each_instance(save: Save) -> None:
    assert main(["convert", save("t.json", modelarts()), "--to", "hccl-1.0", "--save-dir", "out"]) == 0

    assert sorted(path.name for path in Path("out").iterdir()) == [
        "hccl-1.0_decode-0.json",
        "hccl-1.0_prefill-0.json",
    ]
    assert json.loads(Path("out/hccl-1.0_decode-0.json").read_text()) == hccl(server(B, 6, 7))


def test_two_files_of_one_name_write_nothing(save: Save, capsys: Say) -> None:
    twin = server(A)
    twin["device"] = [device("12", "198.51.100.99", 0)]
    document = modelarts(prefill=[server(A, 1, 2)], decode=[twin])

    assert main(["convert", save("t.json", document), "--to", "modelarts", "--save-dir", "out"]) == 2

    assert not Path("out").exists()
    assert f"prefill-0 and decode-0 would both be written to local_ranktable_{A}_12.json" in capsys.readouterr().err


def test_the_input_is_not_overwritten(save: Save, tmp_path: Path, capsys: Say) -> None:
    name = f"global_ranktable_{A}.json"
    path = save(name, modelarts())
    before = Path(path).read_text()

    assert main(["convert", path, "--to", "modelarts", "--save-dir", "."]) == 2

    assert Path(path).read_text() == before
    assert "is an input and would be overwritten" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("document", "flags", "message"),
    [
        (modelarts(), ["--api-server", C], "--api-server 192.0.2.3: the table has a scheduler already: 192.0.2.1"),
        (modelarts(), ["--role", "prefill"], "--role prefill is for a table of one instance, but this table has 2"),
        (mindie(), ["--num-prefill", "1"], "modelarts tables have one scheduler, but this one has 2: 192.0.2.1"),
        (kubeinfer(), ["--num-prefill", "0"], "--num-prefill is 0, but must be at least 1"),
        (omni_merged(), ["--num-prefill", "1", "--api-server", "10.**.**.1"], "that is a masked address"),
        (omni_merged(), ["--num-prefill", "1", "--api-server", "localhost"], "as modelarts the table would be invalid"),
    ],
)
def test_losses_of_a_conversion_are_reported(
    save: Save, capsys: Say, document: Document, flags: list[str], message: str
) -> None:
    status = main(["convert", save("t.json", document), "--to", "modelarts", *flags])

    assert status == 2
    assert message in capsys.readouterr().err


def test_an_instance_over_servers_becomes_a_local_table(save: Save, capsys: Say) -> None:
    table, _ = _converted(save, capsys, hccl(), "--to", "modelarts")

    assert table == local(server(A, 0, 1), server(B, 0, 1, first_rank=2))


def test_missing_device_addresses_are_reported_with_the_place(save: Save, capsys: Say) -> None:
    entry = server(A, 0)
    del entry["device"][0]["device_ip"]

    assert main(["convert", save("t.json", hccl(entry)), "--to", "modelarts"]) == 2
    assert "as modelarts the table would be invalid: server_list[0].device[0].device_ip is missing" in (
        capsys.readouterr().err
    )
