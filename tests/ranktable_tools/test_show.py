"""A drawn table: its members and which of them connect."""

from collections.abc import Callable

import pytest

from ranktable_tools.cli import main
from tests.ranktable_tools.documents import (
    Document,
    group,
    grouped,
    hccl,
    hccl_1_2,
    kubeinfer,
    local,
    mindie,
    modelarts,
    server,
    vllm_ascend,
)

Save = Callable[[str, object], str]
Say = pytest.CaptureFixture[str]


def _show_lines(save: Save, capsys: Say, document: Document, *flags: str) -> list[str]:
    path = save("t.json", document)

    assert main(["show", path, *flags]) == 0
    return [line.removeprefix(f"{path}: ") for line in capsys.readouterr().out.splitlines()]


def test_the_guides_cluster_has_clients_a_scheduler_instances_and_kv(save: Save, capsys: Say) -> None:
    two = [server("192.0.2.2", 6, server_port="8089"), server("192.0.2.3", 0, 1)]
    head, *lines = _show_lines(save, capsys, modelarts(decode=two))

    assert head.startswith("modelarts, 1 prefill, 2 decode, digest ")
    assert lines == [
        "  clients",
        "   | HTTP",
        "  scheduler  192.0.2.1",
        "   |-- prefill 0   192.0.2.1  devices 4,5",
        "   |-- decode 0    192.0.2.2 port 8089  devices 6",
        "   |-- decode 1    192.0.2.3  devices 0,1",
        "  KV: prefill 0 ==> decode 0..1",
    ]


def test_workers_of_another_engine_are_marked(save: Save, capsys: Say) -> None:
    ours, theirs = server("192.0.2.2", 6), server("192.0.2.3", worker="vllm", url="http://192.0.2.3:8101")
    _, *lines = _show_lines(save, capsys, modelarts(decode=[ours, theirs]))

    assert lines[-1] == "   |-- decode 1    192.0.2.3  worker of vllm http://192.0.2.3:8101"


def test_one_hosts_table_has_no_clients_yet(save: Save, capsys: Say) -> None:
    assert _show_lines(save, capsys, grouped(group(2, server("192.0.2.2", 6)))) == [
        "modelarts, 0 prefill, 1 decode, one host's table, to be merged",
        "    -- decode 0    192.0.2.2  devices 6",
    ]


def test_unknown_roles_are_not_drawn(save: Save, capsys: Say) -> None:
    assert _show_lines(save, capsys, kubeinfer()) == [
        "kubeinfer, 3 instances, roles unknown, use ranktable convert to make a table for pdserve",
        "  clients",
        "   | HTTP",
        "  scheduler  192.0.2.1",
        "   |-- instance 0  192.0.2.1  devices 0,1",
        "   |-- instance 1  192.0.2.2  devices 0,1 + 192.0.2.3  devices 0,1",
        "   |-- instance 2  192.0.2.1  devices 2,3",
    ]
    assert _show_lines(save, capsys, kubeinfer(), "--num-prefill", "2")[-1] == "  KV: prefill 0..1 ==> decode 0"


def test_super_pods_and_notes_are_reported(save: Save, capsys: Say) -> None:
    lines = _show_lines(save, capsys, mindie(), "--num-prefill", "1")

    assert "   |-- prefill 0   192.0.2.1  devices 0,1  super pod 0 + 192.0.2.2  devices 0,1  super pod 0" in lines
    assert lines[-1] == "note: server_group_list[1].server_list[0]: the controller 192.0.2.3 is ignored"


@pytest.mark.parametrize(
    ("document", "lines"),
    [
        (local(), ["modelarts, the table of one instance", "  192.0.2.2  devices 6,7"]),
        (local(server("192.0.2.1")), ["modelarts, the table of the scheduler", "  192.0.2.1"]),
        (hccl(server("192.0.2.1", 0)), ["hccl-1.0, the table of one instance", "  192.0.2.1  devices 0"]),
        (
            hccl_1_2(),
            [
                "hccl-1.2, the table of one instance",
                "  203.0.113.1  devices 0,1  super pod 1",
                "  203.0.113.2  devices 0,1  super pod 1",
            ],
        ),
    ],
)
def test_a_members_own_table_is_drawn_alone(save: Save, capsys: Say, document: Document, lines: list[str]) -> None:
    assert _show_lines(save, capsys, document) == lines


def test_devices_without_instances_show_how_they_were_split(save: Save, capsys: Say) -> None:
    lines = _show_lines(save, capsys, vllm_ascend())

    assert lines[0] == "vllm-ascend, 1 prefill, 2 decode, use ranktable convert to make a table for pdserve"
    assert "(--devices-per-instance changes that)" in lines[-1]
    assert "note" not in _show_lines(save, capsys, vllm_ascend(), "--devices-per-instance", "1")[-1]
