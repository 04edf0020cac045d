"""Entries of the rank table are recognised from one version to the next."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ranktable_tools.launch_plan import LaunchPlan
from ranktable_tools.node_ports import instance_addresses
from ranktable_tools.tables import GlobalTable, TableDevice, TableServer
from scheduler.membership.entries import Entries

SCHEDULER = TableServer("10.0.0.1", "10.0.0.1")


def server(host: int, port: int | None, devices: str = "0") -> TableServer:
    """One entry: an instance on host 10.0.0.N."""
    ip = f"10.0.0.{host}"
    listed = tuple(TableDevice(one, ip, str(rank)) for rank, one in enumerate(devices.split(",")))
    return TableServer(ip, ip, listed, port)


def table(prefill: Sequence[TableServer], decode: Sequence[TableServer]) -> GlobalTable:
    """A whole table."""
    return GlobalTable(SCHEDULER, tuple(prefill), tuple(decode))


def entries(start: GlobalTable, node_ports: str | None = None) -> Entries:
    """The entries of a scheduler that starts with this table."""
    addresses, _ = instance_addresses(start, node_ports)
    plan = LaunchPlan(
        "scheduler", start, "g.json", "l.json", "", SCHEDULER, None, instance_addresses=addresses,
        has_node_ports=node_ports is not None,
    )  # fmt: skip
    return Entries(plan)


def placements(followed: Entries) -> list[tuple[str, str]]:
    """Names and addresses of the current table, in its order."""
    return [(one.name, one.address) for one in followed.expected]


P, D = server(2, 8088), server(3, 8089)


def test_the_first_entries_are_those_of_the_table_at_startup() -> None:
    assert placements(entries(table([P], [D]))) == [("prefill-0", "10.0.0.2:8088"), ("decode-0", "10.0.0.3:8089")]


def test_a_worker_is_reached_by_its_url_and_followed() -> None:
    listed, own = replace(P, worker="vllm"), replace(D, worker="vllm", url="http://10.0.0.9:8101", devices=())
    followed = entries(table([listed], [own]), "7088,7089")

    urls = [("prefill-0", "http://10.0.0.2:7088"), ("decode-0", "http://10.0.0.9:8101")]
    assert placements(followed) == urls
    assert followed.expected[0].is_worker

    other = replace(own, url="http://10.0.0.9:8102")
    followed.follow(table([listed], [own, other]))
    assert placements(followed) == [*urls, ("decode-1", "http://10.0.0.9:8102")]


def test_a_worker_in_both_groups_is_one_combined_member() -> None:
    urls = [f"http://h:{port}" for port in range(1, 5)]
    prefill, decode, both, other = (TableServer("h", "h", worker="vllm", url=url) for url in urls)
    followed = entries(table([both, prefill], [decode, both]))
    start = [("combined-0", "http://h:3"), ("prefill-1", "http://h:1"), ("decode-0", "http://h:2")]
    assert placements(followed) == start
    assert [one.index for one in followed.expected] == [0, 1, 2]

    followed.follow(table([prefill, both, other], [decode, both, other]))
    assert placements(followed) == [start[1], start[0], ("combined-1", "http://h:4"), start[2]]

    followed.follow(table([prefill, both], [decode, other]))
    assert placements(followed)[1:] == [("prefill-2", "http://h:3"), start[2], ("decode-2", "http://h:4")]


def test_entries_keep_their_number_and_new_ones_get_the_next() -> None:
    followed = entries(table([P], [D]))
    before = followed.expected

    followed.follow(table([server(4, 8090), P], [D, server(5, 8091)]))

    assert placements(followed) == [
        ("prefill-1", "10.0.0.4:8090"),
        ("prefill-0", "10.0.0.2:8088"),
        ("decode-0", "10.0.0.3:8089"),
        ("decode-1", "10.0.0.5:8091"),
    ]
    assert {*before} < {*followed.expected}
    assert len({one.index for one in followed.expected}) == 4


def test_a_removed_entrys_number_is_reused_only_for_itself() -> None:
    followed = entries(table([P], [D, server(4, 8090)]))

    followed.follow(table([P], [server(4, 8090)]))
    assert placements(followed)[1:] == [("decode-1", "10.0.0.4:8090")]
    followed.follow(table([P], [server(5, 8091), server(4, 8090)]))
    assert placements(followed)[1:] == [("decode-2", "10.0.0.5:8091"), ("decode-1", "10.0.0.4:8090")]
    followed.follow(table([P], [D, server(5, 8091)]))
    assert placements(followed)[1:] == [("decode-0", "10.0.0.3:8089"), ("decode-2", "10.0.0.5:8091")]


def test_node_ports_apply_to_the_entries_of_the_start() -> None:
    bare = [replace(one, server_port=None) for one in (P, D)]
    followed = entries(table(bare[:1], bare[1:]), "9088,9089")

    reported = followed.follow(table(bare[:1], [*bare[1:], server(4, 8090), server(5, None)]))

    assert [address for _, address in placements(followed)] == ["10.0.0.2:9088", "10.0.0.3:9089", "10.0.0.4:8090"]
    assert reported.left_out == (
        "decode instance on 10.0.0.5 is left out: server_group_list[2].server_list[2] of the global table has no "
        "server_port, and NODE_PORTS is for the instances at the start",
    )


def test_node_ports_do_not_apply_to_a_port_that_the_table_names_later() -> None:
    bare = [replace(one, server_port=None) for one in (P, D)]
    followed = entries(table(bare[:1], bare[1:]), "9088,9089")

    followed.follow(table([P], [D]))
    assert [address for _, address in placements(followed)] == ["10.0.0.2:9088", "10.0.0.3:9089"]


def test_a_removed_initial_entry_needs_a_port_to_return() -> None:
    bare = [replace(one, server_port=None) for one in (P, D, server(4, None))]
    followed = entries(table(bare[:1], bare[1:]), "9088,9089,9090")
    followed.follow(table(bare[:1], bare[1:2]))

    reported = followed.follow(table(bare[:1], bare[1:]))

    assert len(reported.left_out) == 1
    assert len(reported.expected) == 2


def test_a_changed_port_is_another_instance() -> None:
    followed = entries(table([P], [D]))

    followed.follow(table([P], [replace(D, server_port=None)]))
    assert placements(followed)[1] == ("decode-0", "10.0.0.3:8089")
    followed.follow(table([P], [replace(D, server_port=9000)]))
    assert placements(followed)[1] == ("decode-1", "10.0.0.3:9000")


@pytest.mark.parametrize("change", [{"devices": (TableDevice("0", "10.9.9.9", "0"),)}, {"server_ip": "10.0.0.9"}])
def test_a_changed_host_or_device_address_is_another_instance(change: dict[str, object]) -> None:
    followed = entries(table([P], [D]))

    followed.follow(table([P], [replace(D, **change)]))  # type: ignore[arg-type]

    assert followed.expected[1].name == "decode-1"


def test_an_entry_with_a_changed_role_is_another_instance() -> None:
    followed = entries(table([P, server(4, 8090)], [D]))

    followed.follow(table([P], [D, server(4, 8090)]))

    assert placements(followed)[2] == ("decode-1", "10.0.0.4:8090")


def test_instances_sharing_devices_differ_by_port() -> None:
    followed = entries(table([P], [server(3, 8089), server(3, 8090)]))

    followed.follow(table([P], [server(3, 8090)]))

    assert placements(followed)[1:] == [("decode-1", "10.0.0.3:8090")]


def test_an_ipv6_host_is_bracketed() -> None:
    six = TableServer("fe80::1", "fe80::1", (TableDevice("0", "fe80::1", "0"),), 8089)

    assert placements(entries(table([P], [six])))[1] == ("decode-0", "[fe80::1]:8089")
