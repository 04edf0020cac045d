"""Read this machine's own addresses from the kernel, without sending anything."""

import array
import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

_SIOCGIFCONF = 0x8912
_IFREQ_BYTES = 40  # struct ifreq on 64-bit Linux: the name at offset 0, the IPv4 address at 20
_MAX_INTERFACES = 1024
# Bridges between containers of one host, not reachable from other hosts.
_BRIDGES = re.compile(r"(docker|br-|veth|virbr|cni|flannel|cali|tunl|kube|podman|lxc)")


def interface_addresses() -> tuple[str, ...]:
    """Return the addresses of all interfaces in the kernel's order: IPv4, IPv6, bridges last.

    Empty if the kernel does not report them.
    """
    return bridges_last((*_ipv4_addresses(), *_ipv6_addresses()))


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has `address`, or None."""
    return next((name for name, found in (*_ipv4_addresses(), *_ipv6_addresses()) if found == address), None)


def bridges_last(named: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return the addresses of (interface name, address) pairs, container bridges last."""
    return tuple(address for _, address in sorted(named, key=lambda pair: _BRIDGES.match(pair[0]) is not None))


def route_source(family: socket.AddressFamily, destination: str) -> str | None:
    """Return the source address of packets to `destination`, or None without a route. Sends no packet."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((destination, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _ipv4_addresses() -> list[tuple[str, str]]:
    buffer = array.array("B", bytes(_IFREQ_BYTES * _MAX_INTERFACES))
    request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            (filled,) = struct.unpack_from("i", fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, request))
    except OSError:
        return []
    entries = bytes(buffer[:filled])
    return [
        (entries[at : at + 16].split(b"\0")[0].decode(errors="replace"), socket.inet_ntoa(entries[at + 20 : at + 24]))
        for at in range(0, filled, _IFREQ_BYTES)
    ]


def _ipv6_addresses() -> list[tuple[str, str]]:
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    split = [line.split() for line in lines if line.strip()]
    return [(words[-1], str(ipaddress.IPv6Address(int(words[0], 16)))) for words in split]
