"""/etc/hccn.conf."""

from ranktable_tools.devices.hccn_conf import parse_conf
from tests.ranktable_tools import recorded


def test_addresses_are_read_and_other_keys_ignored() -> None:
    assert parse_conf(recorded.CONF) == {"0": "10.20.11.11", "1": "10.20.11.12"}


def test_meaningless_lines_are_ignored() -> None:
    text = "# a comment\n\naddress_0\naddress_x=10.0.0.1\naddress_1=\naddress_2=10.**.**.1\ngateway_3=10.0.0.1\n"

    assert parse_conf(text) == {}


def test_an_ipv6_address_is_used_if_there_is_no_other() -> None:
    text = "IPv6address_0=fd00::10/64\nIPv6gateway_0=fd00::1\nIPv6address_1=fd00::11\naddress_1 = 10.0.0.11\n"

    assert parse_conf(text) == {"0": "fd00::10", "1": "10.0.0.11"}
