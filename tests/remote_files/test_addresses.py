"""Which addresses may be connected to, in every notation of them."""

import pytest

from remote_files.addresses import AddressRules
from wire.errors import ConfigError

PUBLIC = AddressRules()
EVERYTHING = AddressRules.of(["0.0.0.0/0", "::/0"])

NEVER = [
    "169.254.169.254", "169.254.170.2", "169.254.0.23", "100.100.100.200", "168.63.129.16", "192.0.0.192", "0.0.0.0",
    "0.1.2.3", "224.0.0.1", "255.255.255.255", "240.0.0.1", "::", "fe80::1", "fe80::1%lo", "febf::1", "fd00:ec2::254",
    "fd00:ec2::23", "fd20:ce::254", "ff02::1", "2001:0:1::1",
    "::ffff:169.254.169.254", "::169.254.169.254", "64:ff9b::a9fe:a9fe", "64:ff9b:1::a9fe:a9fe", "2002:a9fe:a9fe::1",
    "::ffff:0:169.254.169.254",
]  # fmt: skip
PRIVATE = [
    "127.0.0.1", "127.255.255.254", "::1", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1",
    "192.0.2.1", "198.18.0.1", "203.0.113.1", "fc00::1", "fd12:3456::1", "fec0::1", "2001:db8::1", "100::1", "4000::1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::1", "2002:a00:1::",
    "192.0.0.8",
]  # fmt: skip
OPEN = [
    "8.8.8.8", "1.1.1.1", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808",
    "2002:808:808::1",
]  # fmt: skip
NO_ADDRESS = [
    "127.1", "0x7f.1", "0x7f000001", "2130706433", "0177.0.0.1", "127.0.0.1.", "localhost", "",
    "\uff1127.0.0.1", "[::1]",
]  # fmt: skip


@pytest.mark.parametrize("address", NEVER)
@pytest.mark.parametrize("rules", [PUBLIC, EVERYTHING], ids=["public", "everything"])
def test_link_local_and_metadata_addresses_are_never_allowed(rules: AddressRules, address: str) -> None:
    assert f"pdserve never connects to {address} (" in str(rules.refusal(address))


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_allowed_only_by_flag(address: str) -> None:
    assert EVERYTHING.refusal(address) is None
    refusal = str(PUBLIC.refusal(address))
    reported, _, flag = refusal.partition(": --allow-private-urls ")
    assert reported == f"{address} is not a public address"
    assert AddressRules.of([flag.removesuffix(" allows it")]).refusal(address) is None, "following its advice helps"


@pytest.mark.parametrize("address", OPEN)
def test_public_addresses_are_allowed(address: str) -> None:
    assert PUBLIC.refusal(address) is None


@pytest.mark.parametrize("text", NO_ADDRESS)
@pytest.mark.parametrize("rules", [PUBLIC, EVERYTHING], ids=["public", "everything"])
def test_an_address_is_accepted_only_in_its_full_form(rules: AddressRules, text: str) -> None:
    assert rules.refusal(text) == f"{text!r} is not an IP address in its full form"


def test_a_flag_opens_its_own_network_and_no_other() -> None:
    rules = AddressRules.of(["10.1.0.0/16", "fd12::/16", "127.0.0.1"])

    assert not any(map(rules.refusal, ("10.1.2.3", "::ffff:10.1.2.3", "fd12::9", "127.0.0.1")))
    assert all(map(rules.refusal, ("10.2.0.1", "fd13::1", "127.0.0.2", "::1", "192.168.0.1")))


@pytest.mark.parametrize("text", ["169.254.0.0/16", "169.254.169.254", "fe80::/64", "100.100.100.200/32"])
def test_a_flag_cannot_name_a_network_that_is_never_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot be allowed"):
        AddressRules.of([text])


@pytest.mark.parametrize("text", ["10.0.0.1/8", "ten", "", "10.0.0.0/33", "*"])
def test_an_invalid_network_of_a_flag_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a network: .*; write it as 10\.0\.0\.0/8"):
        AddressRules.of([text])
