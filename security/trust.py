"""Which peers a process accepts: those that prove they hold the cluster secret or, without one, those in the table."""

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from security.secret import Secret, find_secret
from security.tls import TlsFiles
from telemetry.logs import EventLogger
from wire.errors import Incompatible

_log = EventLogger("trust")

_MAX_HOST_CHARS = 64


class LiveAddresses(AbstractSet[str]):
    """Owner of the addresses of a table that changes; any thread may read them, and they are replaced as a whole."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._addresses = frozenset(addresses)
        self._watchers: list[Callable[[], None]] = []

    def replace(self, addresses: Iterable[str]) -> None:
        """Use these addresses from now on; existing links are not checked again."""
        self._addresses = frozenset(addresses)
        for changed in tuple(self._watchers):
            changed()

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` after every change, on the thread that makes the change. `changed` must not block."""
        self._watchers.append(changed)

    def unwatch(self, changed: Callable[[], None]) -> None:
        """Stop calling `changed`."""
        with contextlib.suppress(ValueError):
            self._watchers.remove(changed)

    def __contains__(self, address: object) -> bool:
        return address in self._addresses

    def __iter__(self) -> Iterator[str]:
        return iter(self._addresses)

    def __len__(self) -> int:
        return len(self._addresses)


@dataclass(frozen=True, slots=True)
class Trust:
    """One process's rules for accepting peers; the default is loopback only, for a process without a table.

    `addresses` are the IP addresses of the table's hosts, used only without a secret; `loopback` is whether this host
    is one of them. `host` identifies this process in messages.
    """

    secret: Secret | None = None
    addresses: AbstractSet[str] = frozenset()
    loopback: bool = True
    tls: TlsFiles | None = None
    host: str = field(default_factory=socket.gethostname)

    def has_address(self, address: str) -> bool:
        """Return whether a socket's numeric address is one of the table's."""
        spelled = spell(address)
        if spelled is None:
            return False
        return spelled in self.addresses or (self.loopback and ipaddress.ip_address(spelled).is_loopback)

    def follow(self, hosts: Iterable[str]) -> None:
        """Use the hosts of another table from now on, if the addresses come from a table (`find_trust`)."""
        if isinstance(self.addresses, LiveAddresses):
            self.addresses.replace(_canonical_addresses(hosts))

    def check_address(self, address: str) -> None:
        """Raise Incompatible if peers need not prove a secret and the table does not have this address."""
        if self.secret is None and not self.has_address(address):
            raise Incompatible(self.unlisted(address))

    def unlisted(self, address: str) -> str:
        """Return the message for a peer whose address the table lacks."""
        shown = sorted(self.addresses)[:8] + (["..."] if len(self.addresses) > 8 else [])
        listed = ", ".join(shown + (["loopback"] if self.loopback else [])) or "none"
        return (
            f"{printable(address)} is not in the global table of {self.host} ({listed}), and no cluster "
            f"secret is configured: put one beside the global table of every host"
        )

    def warn(self) -> None:
        """Log the one warning of a process that has a table and no secret."""
        if self.secret is None and self.addresses:
            _log.warning(
                "no_cluster_secret", peers="only addresses of the global table are accepted",
                fix="put cluster_secret beside the global table of every host (docs/security.md)",
            )  # fmt: skip


def find_trust(environ: Mapping[str, str], table_path: str, hosts: Iterable[str], tls: TlsFiles | None = None) -> Trust:
    """Return the trust of a process with a table; `hosts` are the addresses of its entries. Raises ConfigError."""
    spelled = _canonical_addresses(hosts)
    loopback = any(ipaddress.ip_address(address).is_loopback for address in spelled)
    return Trust(find_secret(environ, table_path), LiveAddresses(spelled), loopback, tls)


def spell(address: str) -> str | None:
    """Return the canonical form of an IP address, scope and IPv4-in-IPv6 dropped; None for anything else."""
    try:
        parsed = ipaddress.ip_address(address.strip("[]").partition("%")[0])
    except ValueError:
        return None
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(mapped or parsed)


def printable(text: str) -> str:
    """Return a host name sent by a peer, cut to 64 characters, with unsafe ones replaced."""
    return "".join(char if char.isalnum() or char in ".:-_[]" else "?" for char in text[:_MAX_HOST_CHARS]) or "?"


def _canonical_addresses(hosts: Iterable[str]) -> set[str]:
    return {address for address in map(spell, hosts) if address is not None}
