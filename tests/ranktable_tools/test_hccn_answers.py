"""hccn_tool's recorded output."""

import pytest

from ranktable_tools.devices.hccn_answers import (
    parse_address,
    parse_link,
    parse_net_health,
    parse_ping,
    parse_tls_switch,
)
from tests.ranktable_tools import recorded


@pytest.mark.parametrize(
    ("answer", "address"),
    [
        (recorded.IP, "10.0.245.11"),
        (recorded.VNIC, "192.168.2.199"),
        ("ipaddr:fd00::7\n", "fd00::7"),
        (recorded.IP_UNSET, None),
        (recorded.NO_DEVICE, None),
        ("ipaddr:\n", None),
        ("ipaddr:10.**.**.1\n", None),
        ("ipaddr:0.0.0.0\n", None),
        ("ipaddr:npu-7\n", None),
        ("", None),
    ],
)
def test_an_address_is_a_real_one_or_none(answer: str, address: str | None) -> None:
    assert parse_address(answer) == address


@pytest.mark.parametrize(
    ("answer", "link"), [("link status: UP\n", "UP"), ("link status: DOWN\n", "DOWN"), (recorded.NO_DEVICE, None)]
)
def test_the_link_is_up_or_down(answer: str, link: str | None) -> None:
    assert parse_link(answer) == link


@pytest.mark.parametrize("word", ["Success", "Socket fail", "Receive timeout", "Unreachable", "Init", "Fault"])
def test_network_health_is_the_tools_own_term(word: str) -> None:
    assert parse_net_health(f"net health status: {word}\n") == word


@pytest.mark.parametrize(
    ("answer", "switch"),
    [(recorded.TLS, "0"), (recorded.TLS.replace("switch[0]", "switch[1]"), "1"), (recorded.NO_DEVICE, None)],
)
def test_the_tls_switch_is_read_among_other_numbers(answer: str, switch: str | None) -> None:
    assert parse_tls_switch(answer) == switch


def test_answered_and_lost_pings_are_distinguished() -> None:
    assert parse_ping(recorded.PING)
    assert parse_ping(recorded.HCCS_PING)
    assert not parse_ping(recorded.PING_LOST)
    assert not any(parse_ping(answer) for answer in (*recorded.HCCS_PING_FAILED, recorded.NO_DEVICE, ""))
