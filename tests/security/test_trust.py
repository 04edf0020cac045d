"""Which addresses a process accepts as peers without a secret."""

import logging

import pytest

from security.grpc_proof import peer_address
from security.secret import Secret
from security.trust import Trust, find_trust, printable, spell
from wire.errors import Incompatible

SECRET = Secret(b"s" * 32)


def test_a_process_without_a_table_trusts_loopback_alone() -> None:
    trust = Trust()

    assert trust.has_address("127.0.0.1")
    assert trust.has_address("127.8.8.8")
    assert trust.has_address("::1")
    assert trust.has_address("::ffff:127.0.0.1")
    assert not trust.has_address("10.0.0.1")


def test_without_a_secret_only_addresses_of_the_table_are_peers() -> None:
    trust = find_trust({}, "/nowhere/global.json", ["10.0.0.5", "fe80::1", "host-name"])

    assert trust.secret is None
    assert trust.has_address("10.0.0.5")
    assert trust.has_address("::ffff:10.0.0.5")
    assert trust.has_address("fe80::1%eth0")
    for other in ("10.0.0.6", "127.0.0.1", "::1", "", "host-name", "10.0.0.5.evil.com"):
        assert not trust.has_address(other)
        with pytest.raises(Incompatible, match="is not in the global table"):
            trust.check_address(other)


def test_loopback_counts_when_the_table_has_this_host() -> None:
    assert find_trust({}, "/nowhere/g.json", ["10.0.0.5", "127.0.0.1"]).has_address("127.0.0.1")


def test_the_hosts_of_a_new_table_replace_those_before() -> None:
    trust = find_trust({}, "/nowhere/g.json", ["10.0.0.5"])

    trust.follow(["10.0.0.6", "host-name"])

    assert trust.has_address("10.0.0.6")
    assert not trust.has_address("10.0.0.5")
    assert trust.addresses == {"10.0.0.6"}


def test_with_a_secret_the_address_is_not_checked() -> None:
    Trust(SECRET, frozenset(), loopback=False).check_address("10.9.9.9")


def test_a_missing_secret_is_one_warning_only_with_a_table(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pdserve"):
        Trust().warn()
        Trust(SECRET, frozenset({"10.0.0.5"})).warn()
        assert not caplog.records
        Trust(addresses=frozenset({"10.0.0.5"})).warn()

    assert [record.getMessage().split()[0] for record in caplog.records] == ["no_cluster_secret"]


def test_text_from_a_peer_is_truncated_and_sanitized() -> None:
    assert printable("a\n2026 ERROR\x1b[31m") == "a?2026?ERROR?[31m"
    assert printable("x" * 1000) == "x" * 64
    assert printable("") == "?"


def test_an_address_has_one_canonical_form() -> None:
    assert spell("[2001:DB8:0::1]") == spell("2001:db8::1") == "2001:db8::1"
    assert spell("localhost") is None


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.5:40000", "10.0.0.5"),
        ("ipv6:%5B::1%5D:40000", "::1"),
        ("ipv6:[fe80::1%25eth0]:40000", "fe80::1%eth0"),
        ("ipv6:%5B::ffff:10.0.0.5%5D:40000", "::ffff:10.0.0.5"),
        ("unix:/run/socket", ""),
        ("", ""),
    ],
)
def test_the_address_is_parsed_from_grpcs_peer(peer: str, address: str) -> None:
    class Context:
        def peer(self) -> str:
            return peer

    assert peer_address(Context()) == address
