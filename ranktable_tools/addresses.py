"""Resolve which host an address or name refers to, including localhost, host names, 127.0.0.1 and ::1."""

import ipaddress
import queue
import re
import socket
import threading
import time
from collections.abc import Callable

from ranktable_tools.interfaces import interface_addresses, route_source

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
# Documentation networks (RFC 5737, RFC 3849): never a real host, and connecting a UDP socket sends nothing.
_UNUSED_ADDRESSES = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
_HOST = re.compile(r"[A-Za-z0-9._:-]{1,253}(%[A-Za-z0-9._-]{1,15})?")


def host_problem(text: str) -> str | None:
    """Return why `text` cannot be a host's address or name, or None."""
    if "*" in text:
        return "that is a masked address: write the real one"
    address = _parse_address(text)
    if _HOST.fullmatch(text) is None or (address is None and set(text) <= set("0123456789.:")):
        return "that is not an address or host name"
    if address is not None and address.is_unspecified:
        return "that is an address to listen on, not one to reach a host at"
    return None


def scope_problem(text: str) -> str | None:
    """Return why an address that passes `host_problem` does not identify a host by itself, or None."""
    address = _parse_address(text)
    if not isinstance(address, ipaddress.IPv6Address) or not address.is_link_local or address.scope_id is not None:
        return None
    return (
        "a link-local address needs an interface: write an address at which other hosts reach this one, "
        f"or {text}%INTERFACE if the interface has the same name on every host"
    )


def is_address(text: str) -> bool:
    """Return whether `text` is the numeric address of one host."""
    return _parse_address(text) is not None and host_problem(text) is None


def canonical(host: str) -> str:
    """Return the canonical spelling of an address or name; the loopback names become `localhost`."""
    name = host.strip("[]").rstrip(".").lower()
    address = _parse_address(name)
    spelled = name if address is None else str(address)
    return "localhost" if spelled in LOOPBACK else spelled


def dial_host(host: str) -> str:
    """Return the address to connect to: 127.0.0.1 for `localhost`, since a server on 0.0.0.0 listens there."""
    return "127.0.0.1" if host.lower() == "localhost" else host


def same_host(a: str, b: str) -> bool:
    """Return whether two addresses or names refer to the same machine; names other than this machine's are resolved."""
    return HostComparer().same(a, b)


class HostComparer:
    """Compares many hosts, each looked up once and only when needed. Owns the cache of lookups.

    No lookup starts once lookups have taken `lookups_s` in total; a name not looked up equals only itself.
    """

    def __init__(
        self,
        lookups_s: float = 10.0,
        look_up: Callable[[str], frozenset[str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own = own_hosts()
        self._resolved: dict[str, frozenset[str]] = {}
        self._left_s = lookups_s
        self._look_up = look_up or resolve
        self._clock = clock

    def same(self, a: str, b: str) -> bool:
        """Return whether two addresses or names refer to the same machine."""
        return a == b or not self.resolved(a).isdisjoint(self.resolved(b))

    def resolved(self, host: str) -> frozenset[str]:
        """Return every known canonical name and address of the machine that `host` refers to."""
        if host not in self._resolved:
            self._resolved[host] = _names_of(host, self._own, self._timed_look_up)
        return self._resolved[host]

    def _timed_look_up(self, name: str) -> frozenset[str]:
        if self._left_s <= 0:
            return frozenset()
        began = self._clock()
        found = self._look_up(name)
        self._left_s -= self._clock() - began
        return found


def own_hosts() -> frozenset[str]:
    """Return every canonical name and address of this machine."""
    known = (*LOOPBACK, socket.gethostname(), *interface_addresses())
    return LOOPBACK | {canonical(host) for host in known}


def own_address(
    source: Callable[[socket.AddressFamily, str], str | None] = route_source,
    interfaces: Callable[[], tuple[str, ...]] = interface_addresses,
) -> str:
    """Return this machine's address for other hosts: the default route's, else an interface's, else 127.0.0.1."""
    routed = (source(family, unused_address) for family, unused_address in _UNUSED_ADDRESSES)
    for address in (*routed, *interfaces()):
        if address is not None and _is_public(address):
            return address
    return "127.0.0.1"


def resolve(name: str, timeout_s: float = 5.0) -> frozenset[str]:
    """Return the canonical addresses of a name; empty if it is unknown or the lookup times out."""
    answers: queue.SimpleQueue[frozenset[str]] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(_look_up(name)), daemon=True).start()
    try:
        return answers.get(timeout=timeout_s)
    except queue.Empty:
        return frozenset()


def _names_of(host: str, own: frozenset[str], look_up: Callable[[str], frozenset[str]]) -> frozenset[str]:
    spelled = canonical(host)
    if spelled in own:
        return own
    if _parse_address(spelled) is not None:
        return frozenset({spelled})
    addresses = look_up(spelled)
    # Debian's /etc/hosts names the machine itself 127.0.1.1.
    if not addresses.isdisjoint(own) or any(address.startswith("127.") for address in addresses):
        return own
    return addresses | {spelled}


def _look_up(name: str) -> frozenset[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return frozenset()
    return frozenset(canonical(str(entry[4][0])) for entry in found)


def _parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _is_public(text: str) -> bool:
    address = _parse_address(text)
    return address is not None and not (address.is_loopback or address.is_link_local or address.is_unspecified)
