"""The differences between two tables, as sentences."""

import copy
from collections.abc import Callable

import pytest

from ranktable_tools.cli import main
from tests.ranktable_tools.documents import A, B, C, Document, group, grouped, kubeinfer, local, modelarts, server

Save = Callable[[str, object], str]
Say = pytest.CaptureFixture[str]


def _diff(save: Save, capsys: Say, old: Document, new: Document, *flags: str) -> list[str]:
    status = main(["diff", save("old.json", old), save("new.json", new), *flags])
    lines = capsys.readouterr().out.splitlines()

    assert status == (0 if lines == ["No differences."] else 1)
    return lines


def test_the_same_cluster_written_differently_is_the_same(save: Save, capsys: Say) -> None:
    other = copy.deepcopy(modelarts())
    other["server_group_list"][1]["server_list"][0]["server_id"] = "host-a"
    other["server_group_list"][1]["server_count"] = 1
    other["hardware_type"] = "800I-A2-32G"

    assert _diff(save, capsys, modelarts(), other) == ["No differences."]


def test_an_added_and_a_removed_instance(save: Save, capsys: Say) -> None:
    old = modelarts(prefill=[server(A, 0), server(A, 1)], decode=[server(B, 0)])
    new = modelarts(prefill=[server(A, 0)], decode=[server(B, 0), server(C, 0, 1)])

    assert _diff(save, capsys, old, new) == [
        "prefill-1 (192.0.2.1, device 1) is gone.",
        "decode-1 (192.0.2.3, devices 0,1) is new.",
    ]


def test_a_moved_instance_keeps_its_number(save: Save, capsys: Say) -> None:
    assert _diff(save, capsys, modelarts(), modelarts(decode=[server(C, 6, 7)])) == [
        "decode-0 (192.0.2.2, devices 6,7) moves to 192.0.2.3, devices 6,7."
    ]


def test_a_change_of_role_is_one_sentence(save: Save, capsys: Say) -> None:
    old = modelarts(prefill=[server(A, 0)], decode=[server(A, 1), server(A, 2)])
    new = modelarts(prefill=[server(A, 0), server(A, 2)], decode=[server(A, 1)])

    assert _diff(save, capsys, old, new) == ["decode-1 (192.0.2.1, device 2) becomes prefill-1."]


def test_ports_and_addresses_and_ranks(save: Save, capsys: Say) -> None:
    old = modelarts(prefill=[server(A, 0, server_port="8088"), server(A, 1)])
    new = modelarts(prefill=[server(A, 0, server_port="9088"), server(A, 1, server_port="9089")])
    device = new["server_group_list"][2]["server_list"][0]["device"]
    device[0]["device_ip"] = "198.51.100.77"
    device[0]["rank_id"], device[1]["rank_id"] = "1", "0"

    assert _diff(save, capsys, old, new) == [
        "prefill-0 (192.0.2.1, device 0) changes its port from 8088 to 9088.",
        "prefill-1 (192.0.2.1, device 1) now listens on port 9089.",
        "decode-0: device 6 on 192.0.2.2 changes its device_ip from 198.51.100.26 to 198.51.100.77.",
        "decode-0: device 6 on 192.0.2.2 changes its rank_id from 0 to 1.",
        "decode-0: device 7 on 192.0.2.2 changes its rank_id from 1 to 0.",
    ]


def test_workers_of_another_engine_come_and_change(save: Save, capsys: Say) -> None:
    one, other = (server(B, worker="vllm", url=f"http://{B}:{port}") for port in (8101, 8102))
    old = modelarts(prefill=[server(A, 0)], decode=[one])
    new = modelarts(prefill=[server(A, 0, worker="vllm")], decode=[other, one])

    assert _diff(save, capsys, old, new) == [
        "prefill-0 is now a worker of vllm; it was pdserve's own.",
        "decode-0 (192.0.2.2, http://192.0.2.2:8102) is new.",
    ]
    assert _diff(save, capsys, old, modelarts(prefill=[server(A, 0)], decode=[other])) == [
        "decode-0 (192.0.2.2, http://192.0.2.2:8101) moves to 192.0.2.2, http://192.0.2.2:8102."
    ]


def test_the_scheduler_moves_and_goes(save: Save, capsys: Say) -> None:
    moved, part = modelarts(), modelarts()
    moved["server_group_list"][0] = group(0, server(C))
    del part["server_group_list"][0]

    assert _diff(save, capsys, modelarts(), moved) == ["The scheduler moves from 192.0.2.1 to 192.0.2.3."]
    assert _diff(save, capsys, modelarts(), part) == ["The scheduler on 192.0.2.1 is gone."]
    assert _diff(save, capsys, part, modelarts()) == ["The scheduler on 192.0.2.1 is new."]


def test_a_changed_order_is_reported_for_node_ports(save: Save, capsys: Say) -> None:
    old = modelarts(prefill=[server(A, 0), server(A, 1)])
    new = modelarts(prefill=[server(A, 1), server(A, 0)])

    assert _diff(save, capsys, old, new) == [
        "The order of the instances changes, so the order of NODE_PORTS has to change too."
    ]


def test_tables_of_two_dialects_are_compared(save: Save, capsys: Say) -> None:
    spread = grouped(group(0, server(A)), *(group(n, server(ip, 0, 1)) for n, ip in ((1, A), (2, B), (3, C))))
    guide = modelarts(prefill=[server(A, 0, 1), server(B, 0, 1)], decode=[server(C, 0, 1)])

    assert _diff(save, capsys, spread, guide, "--num-prefill", "2") == ["No differences."]
    assert _diff(save, capsys, guide, kubeinfer(), "--num-prefill", "2", "--new-dialect", "omni") == [
        "prefill-1 (192.0.2.2, devices 0,1) moves to 192.0.2.2 and 192.0.2.3, devices 0,1,0,1.",
        "decode-0 (192.0.2.3, devices 0,1) moves to 192.0.2.1, devices 2,3.",
    ]


def test_local_tables_are_compared_too(save: Save, capsys: Say) -> None:
    assert _diff(save, capsys, local(), local(server(B, 6))) == [
        "instance-0 (192.0.2.2, devices 6,7) moves to 192.0.2.2, device 6."
    ]


def test_a_global_and_a_local_table_are_not_compared(save: Save, capsys: Say) -> None:
    paths = [save("g.json", modelarts()), save("l.json", local())]

    assert main(["diff", *paths]) == 2
    assert f"{paths[0]} is the table of a cluster, but {paths[1]} is the table of one member" in capsys.readouterr().err
