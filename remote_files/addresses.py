"""Rules for the IP addresses that files may be fetched from or sent to. Pure: nothing is resolved."""

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from wire.errors import ConfigError

Network = IPv4Network | IPv6Network
Address = IPv4Address | IPv6Address

# A request to these could fetch the machine's credentials, or reaches no server at all.
_NEVER: tuple[tuple[Network, str], ...] = tuple(
    (ip_network(network), kind)
    for network, kind in (
        ("0.0.0.0/8", "this host"),
        ("::/128", "this host"),
        ("169.254.0.0/16", "link-local: metadata services live there"),
        ("fe80::/10", "link-local"),
        ("100.100.100.200/32", "a metadata service"),
        ("168.63.129.16/32", "a metadata service"),
        ("192.0.0.192/32", "a metadata service"),
        ("fd00:ec2::/32", "metadata services"),
        ("fd20:ce::254/128", "a metadata service"),
        ("224.0.0.0/4", "multicast"),
        ("ff00::/8", "multicast"),
        ("240.0.0.0/4", "reserved"),
        ("2001::/32", "a Teredo tunnel"),
    )
)
_GLOBAL_V6 = IPv6Network("2000::/3")
_PROTOCOLS_V4 = IPv4Network("192.0.0.0/24")  # the IETF's; the ipaddress module of older Pythons knows only part of it
# The embedded IPv4 address is in the last 32 bits; with 6to4, after the first 16.
_EMBEDDING = tuple(map(IPv6Network, ("::ffff:0:0/96", "::/96", "64:ff9b::/96", "64:ff9b:1::/48", "::ffff:0:0:0/96")))
_SIX_TO_FOUR = IPv6Network("2002::/16")


@dataclass(frozen=True, slots=True)
class AddressRules:
    """Public addresses are allowed, others only if in `allow_private`; link-local and metadata addresses never."""

    allow_private: tuple[Network, ...] = ()

    @classmethod
    def of(cls, networks: Iterable[str]) -> "AddressRules":
        """Parse networks in a flag's form (10.0.0.0/8, fd12::/16, 127.0.0.1). Raises ConfigError for any other text."""
        return cls(tuple(_network(text) for text in networks))

    def refusal(self, address: str) -> str | None:
        """Return why `address` (numeric) may not be connected to, or None if it may."""
        try:
            reached = _reached(ip_address(address))
        except ValueError:
            return f"{address!r} is not an IP address in its full form"
        for network, kind in _NEVER:
            if reached in network:
                return f"pdserve never connects to {address} ({kind})"
        if _is_public(reached) or any(reached in network for network in self.allow_private):
            return None
        return f"{address} is not a public address: --allow-private-urls {reached} allows it"


def _network(text: str) -> Network:
    try:
        network = ip_network(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a network: {error}; write it as 10.0.0.0/8") from error
    for never, kind in _NEVER:
        if network.version == never.version and network.subnet_of(never):  # type: ignore[arg-type]
            raise ConfigError(f"{text} cannot be allowed: pdserve never connects to such addresses ({kind})")
    return network


def _reached(address: Address) -> Address:
    """Return the address that a connection reaches: the embedded IPv4 address, if any, else `address`."""
    if isinstance(address, IPv4Address):
        return address
    if address in _SIX_TO_FOUR:
        return IPv4Address(int(address) >> 80 & 0xFFFFFFFF)
    if int(address) > 1 and any(address in network for network in _EMBEDDING):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _is_public(address: Address) -> bool:
    if isinstance(address, IPv6Address) and address not in _GLOBAL_V6:
        return False
    if isinstance(address, IPv4Address) and address in _PROTOCOLS_V4:
        return False
    return address.is_global and not address.is_multicast
