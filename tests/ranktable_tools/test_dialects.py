"""Each dialect is detected by its structure or named, and is read into the one model."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ranktable_tools.any_file import open_table, read_table
from ranktable_tools.dialects.dialect import ReadOptions
from ranktable_tools.dialects.registry import DIALECTS, detect, named
from ranktable_tools.errors import RanktableError
from ranktable_tools.lint import LintOptions, lint
from ranktable_tools.tables import Table, TableDevice, TableInstance, TableServer
from tests.ranktable_tools.documents import (
    SAMPLES,
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


def _device(device_id: int, address: int, rank: int, **more: Any) -> TableDevice:
    return TableDevice(str(device_id), f"198.51.100.{address}", str(rank), **more)


def _read(save: Save, document: object, options: ReadOptions = ReadOptions(), name: str | None = None) -> Table:
    return read_table(save("t.json", document), name, options).reading.table


def test_every_dialect_has_a_sample() -> None:
    assert [dialect.name for dialect in DIALECTS] == list(SAMPLES)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_dialect_is_detected_by_its_structure(name: str) -> None:
    assert detect(SAMPLES[name]()).name == name


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_is_read_without_a_problem(save: Save, name: str) -> None:
    assert read_table(save("t.json", SAMPLES[name]())).dialect.name == name


@pytest.mark.parametrize(("alias", "name"), [("omni", "kubeinfer"), ("clusterd", "mindie"), ("modelarts", "modelarts")])
def test_a_dialect_is_found_by_its_names(alias: str, name: str) -> None:
    assert named(alias).name == name


def test_an_unknown_name_is_refused_with_all_known_ones() -> None:
    with pytest.raises(RanktableError) as caught:
        named("bert")

    assert str(caught.value) == (
        "unknown dialect 'bert'; known: modelarts, hccl-1.0, hccl-1.2, kubeinfer, omni-merged, mindie, vllm-ascend"
    )


@pytest.mark.parametrize(
    ("document", "names"),
    [
        # Ranks that continue across two servers: one instance of kubeinfer's, or two of the guide's with a mistake.
        (modelarts(prefill=[server(A, 0), server(B, 0, first_rank=1)]), "modelarts and kubeinfer"),
        # Pods of one group whose ranks restart: hosts of one instance, or instances of the guide's.
        (
            modelarts(prefill=[server(A, 0, pod_name="p-0"), server(B, 0, pod_name="p-1")], decode=[server(C, 0)]),
            "modelarts and kubeinfer",
        ),
        # Devices in group 0: an instance of merge-all's, or a scheduler with a mistake.
        (grouped(group(0, server(A, 0)), group(1, server(A, 1)), group(2, server(B, 1))), "modelarts and omni-merged"),
        # No device in group 1: MindIE's controller, or an instance with a mistake.
        (grouped(group(0, server(A)), group(1, server(A)), group(2, server(B, 1))), "modelarts and mindie"),
        ({**hccl_1_2(), "group_id": "0"}, "modelarts and hccl-1.2"),
        ({**hccl_1_2(), "version": "1.0"}, "hccl-1.0 and hccl-1.2"),
        ({**modelarts(), **vllm_ascend()}, "modelarts and vllm-ascend"),
        ({**modelarts(), **hccl()}, "modelarts and hccl-1.0"),
    ],
)
def test_an_ambiguous_table_is_refused_with_both_names(save: Save, document: Document, names: str) -> None:
    path = save("t.json", document)

    with pytest.raises(RanktableError) as caught:
        open_table(path)

    assert str(caught.value) == f"{path}: the table could be {names}; choose one with --dialect"
    for name in names.split(" and "):
        assert open_table(path, name).dialect.name == name


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "is not a ranktable; a table has server_group_list, server_list, or prefill_device_list and decode_"),
        ([], "is []; must be an object"),
        ({"status": "initializing", "version": "1.0"}, 'the table is not complete yet, wait for "completed"'),
        ({"version": "2.0", "rank_count": "8", "rank_list": []}, '"2.0" (Ascend 950), which is not supported'),
    ],
)
def test_a_foreign_table_is_reported(save: Save, document: object, message: str) -> None:
    with pytest.raises(RanktableError) as caught:
        open_table(save("t.json", document))

    assert message in str(caught.value)


def test_kubeinfer_has_a_group_per_instance(save: Save) -> None:
    one = TableInstance("prefill", (TableServer(A, A, (_device(0, 10, 0), _device(1, 11, 1))),))
    spread = TableInstance(
        "prefill",
        (
            TableServer(B, B, (_device(0, 20, 0), _device(1, 21, 1)), pod_name="p-1-0"),
            TableServer(C, C, (_device(0, 30, 2), _device(1, 31, 3)), pod_name="p-1-1"),
        ),
    )
    decode = TableInstance("decode", (TableServer(A, A, (_device(2, 12, 0), _device(3, 13, 1))),))

    table = _read(save, kubeinfer(), ReadOptions(num_prefill=2))

    assert table == Table("cluster", (TableServer(A, A, pod_name="proxy-0"),), (one, spread, decode))


def test_roles_are_not_guessed(save: Save) -> None:
    table = _read(save, kubeinfer())

    assert [instance.role for instance in table.instances] == [None, None, None]


@pytest.mark.parametrize("name", ["kubeinfer", "omni-merged", "mindie"])
def test_given_the_prefill_instances_the_rest_is_one_decode_instance(save: Save, name: str) -> None:
    with pytest.raises(RanktableError, match="has 3 instances; --num-prefill is 3: it must leave a decode instance"):
        _read(save, SAMPLES[name](), ReadOptions(num_prefill=3))


def test_omni_merged_begins_with_the_first_prefill_instance(save: Save) -> None:
    table = _read(save, omni_merged(), ReadOptions(num_prefill=1))

    assert table.schedulers == ()
    assert [(one.role, one.servers[0].server_ip, one.servers[0].device_ids) for one in table.instances] == [
        ("prefill", A, ("0", "1")),
        ("decode", A, ("2", "3")),
        ("decode", B, ("0", "1")),
    ]


def test_mindie_has_coordinators_super_pods_and_jobs(save: Save) -> None:
    opened = read_table(save("t.json", mindie()), options=ReadOptions(num_prefill=1))
    table = opened.reading.table

    assert [server.server_ip for server in table.schedulers] == [A, B]
    assert [(one.role, [server.server_ip for server in one.servers]) for one in table.instances] == [
        ("prefill", [A, B]),
        ("decode", [C]),
        ("decode", ["192.0.2.4"]),
    ]
    assert [server.super_pod_id for one in table.instances for server in one.servers] == ["0", "0", "0", "1"]
    assert table.instances[0].servers[1].devices[1] == _device(1, 21, 3, super_device_id="1001", device_logical_id="1")
    assert opened.reading.notes == ("server_group_list[1].server_list[0]: the controller 192.0.2.3 is ignored",)


def test_vllm_ascend_devices_are_split_as_given(save: Save) -> None:
    hosts = _read(save, vllm_ascend())
    cut = _read(save, vllm_ascend(), ReadOptions(devices_per_instance=2))

    def devices(table: Table) -> list[tuple[str | None, list[tuple[str, tuple[str, ...]]]]]:
        return [(one.role, [(s.server_ip, s.device_ids) for s in one.servers]) for one in table.instances]

    assert devices(hosts) == [("prefill", [(A, ("0", "1"))]), ("decode", [(B, ("0",))]), ("decode", [(C, ("0",))])]
    assert devices(cut) == [("prefill", [(A, ("0", "1"))]), ("decode", [(B, ("0",)), (C, ("0",))])]
    assert [device.rank_id for device in cut.instances[1].devices] == ["0", "1"]
    assert hosts.instances[0].servers[0].super_pod_id == "0"
    assert hosts.instances[0].devices[1].super_device_id == "106758160"


def test_a_split_that_leaves_a_remainder_is_refused(save: Save) -> None:
    with pytest.raises(RanktableError, match="prefill_device_list has 2 devices; the number must be a multiple of"):
        _read(save, vllm_ascend(), ReadOptions(devices_per_instance=3))


def test_hccl_is_read_as_one_instance_over_its_servers(save: Save) -> None:
    table = _read(save, hccl())

    one = TableServer(A, A, (_device(0, 10, 0), _device(1, 11, 1)))
    other = TableServer(B, B, (_device(0, 20, 2), _device(1, 21, 3)))
    assert table == Table("instance", (), (TableInstance(None, (one, other)),))


def test_a_pod_is_reached_at_its_own_address(save: Save) -> None:
    table = _read(save, hccl_1_2())

    first = table.instances[0].servers[0]
    assert (first.server_id, first.server_ip, first.host_ip) == (A, "203.0.113.1", A)
    assert first.super_pod_id == "1"
    assert first.devices[0].super_device_id == "113246208"


def test_hccl_of_one_host_may_omit_device_addresses(save: Save) -> None:
    entry = server(A, 0, 1)
    for listed in entry["device"]:
        del listed["device_ip"]

    table = _read(save, hccl(entry))

    assert [device.device_ip for device in table.instances[0].devices] == [None, None]


def test_a_local_table_of_other_tools_may_have_several_servers(save: Save) -> None:
    table = _read(save, local(server(A, 0, 1), server(B, 0, 1, first_rank=2)))

    assert [server.server_ip for server in table.instances[0].servers] == [A, B]


def test_the_guides_scheduler_and_instances_have_their_places(save: Save) -> None:
    reading = read_table(save("t.json", modelarts())).reading

    assert [located.json_path for located in reading.servers] == [
        f"server_group_list[{i}].server_list[0]" for i in range(3)
    ]
    assert [json_path for json_path, _ in reading.instances[1].located_devices] == [
        "server_group_list[2].server_list[0].device[0]",
        "server_group_list[2].server_list[0].device[1]",
    ]


def test_a_device_port_is_kept(save: Save) -> None:
    document = modelarts()
    document["server_group_list"][1]["server_list"][0]["device"][0]["device_port"] = "16667"

    table = _read(save, document)

    assert table.instances[0].devices[0] == replace(_device(4, 14, 0), device_port="16667")


def test_a_super_pod_id_may_be_any_string(save: Save) -> None:
    document = hccl_1_2()
    document["super_pod_list"] = [pod("pod-a", A, B)]

    assert _read(save, document).instances[0].servers[0].super_pod_id == "pod-a"


def test_only_in_the_guides_table_may_a_device_have_its_hosts_name(save: Save) -> None:
    """As `ranktable gen --ip node-1.example` writes it where devices have no address of their own."""
    entry = {**server("node-1.example", 4), "device": [device("4", "node-1.example", 0)]}

    guides = lint([save("g.json", modelarts(prefill=[entry], decode=[server(B, 6)]))], LintOptions())
    others = lint([save("h.json", hccl(entry))], LintOptions())

    assert (guides, [finding.code for finding in others]) == ([], ["device-name"])
