"""Addresses that an instance's KV links bind to: --kv-ip, else --host or the instance's address in the table."""

from collections.abc import Callable

from instance.config import InstanceConfig
from ranktable_tools.addresses import LOOPBACK
from ranktable_tools.interfaces import interface_addresses

_ANY_HOST = ("", "0.0.0.0", "::")  # noqa: S104 - compared, never bound


def kv_host(config: InstanceConfig) -> str:
    """Return the address that KV listeners bind to: --kv-ip, else --host, but the table's if that is a wildcard."""
    if config.options.kv_ip is not None:
        return config.options.kv_ip
    return config.server_ip if config.options.host in _ANY_HOST else config.options.host


def kv_source(config: InstanceConfig, own: Callable[[], tuple[str, ...]] = interface_addresses) -> str | None:
    """Return the source address of outgoing KV links: --kv-ip, else the table's address, which peers know.

    None lets the kernel choose: on loopback, and where this machine does not own the address, as in a container whose
    host owns it.
    """
    source = config.options.kv_ip or config.server_ip
    return source if source not in LOOPBACK and source in own() else None
