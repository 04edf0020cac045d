"""This machine's own addresses, compared with what the kernel allows to bind."""

import socket

from ranktable_tools.interfaces import bridges_last, interface_addresses, route_source


def test_every_ipv4_address_found_can_be_bound() -> None:
    found = [address for address in interface_addresses() if ":" not in address]

    assert "127.0.0.1" in found
    for address in found:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))


def test_the_source_towards_loopback_is_loopback() -> None:
    assert route_source(socket.AF_INET, "127.0.0.1") == "127.0.0.1"


def test_without_a_route_there_is_no_source_address() -> None:
    assert route_source(socket.AF_INET, "255.255.255.255") is None


def test_bridges_between_containers_come_last() -> None:
    named = [("lo", "127.0.0.1"), ("docker0", "172.17.0.1"), ("bond0", "10.0.0.7"), ("br-4f2a", "172.18.0.1")]

    assert bridges_last(named) == ("127.0.0.1", "10.0.0.7", "172.17.0.1", "172.18.0.1")
