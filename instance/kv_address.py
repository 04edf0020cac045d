"""Where an instance's KV links listen and start: --kv-ip, else the address that the table has for it."""

from collections.abc import Callable

from instance.config import InstanceConfig
from ranktable_tools.addresses import LOOPBACK
from ranktable_tools.interfaces import interface_addresses

_ANY_HOST = ("", "0.0.0.0", "::")  # noqa: S104 - compared, never bound


def kv_host(config: InstanceConfig) -> str:
    """Return where KV listeners bind; the table's address where --host is a wildcard: it is the one told to peers."""
    if config.options.kv_ip is not None:
        return config.options.kv_ip
    return config.server_ip if config.options.host in _ANY_HOST else config.options.host


def kv_source(config: InstanceConfig, own: Callable[[], tuple[str, ...]] = interface_addresses) -> str | None:
    """Return where outgoing KV links start: peers know this instance by the table's address.

    None leaves it to the kernel: on loopback, and where this machine does not have the address, as in a container
    whose host has it.
    """
    source = config.options.kv_ip or config.server_ip
    return source if source not in LOOPBACK and source in own() else None
