"""The addresses of one instance: where it listens, where its KV links start, and what HCCL, NCCL and gloo are told."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from devices.network import interface_variables
from devices.table import traits_of
from ranktable_tools.addresses import LOOPBACK, canonical, is_address
from ranktable_tools.devices.kinds import DeviceKind
from ranktable_tools.interfaces import interface_addresses, interface_of
from wire.errors import ConfigError
from wire.options import EngineOptions
from wire.trust import Trust

_DEFAULT_HOST: Final = EngineOptions().host


def with_own_address(options: EngineOptions, server_ip: str) -> EngineOptions:
    """Return the options with --ip as the address to listen on, unless --host says another.

    Raises ConfigError, with both, when --ip is not the entry's address: that is where the scheduler looks for it.
    """
    if options.ip is None:
        return options
    if canonical(options.ip) != canonical(server_ip):
        raise ConfigError(
            f"--ip {options.ip} is not server_ip {server_ip} of this entry of the ranktable, where the scheduler looks "
            "for it: write the same into both"
        )
    return replace(options, host=options.ip) if options.host == _DEFAULT_HOST else options


def check_kv_address(kv_ip: str | None, trust: Trust, own: Callable[[], tuple[str, ...]] = interface_addresses) -> None:
    """Raise ConfigError unless --kv-ip is an address of this machine, Incompatible unless peers would take it."""
    if kv_ip is None:
        return
    if not is_address(kv_ip):
        raise ConfigError(f"--kv-ip {kv_ip!r} is no address of a host, as 10.0.1.18")
    addresses = tuple(dict.fromkeys((*own(), "127.0.0.1", "::1")))
    if kv_ip not in addresses:
        raise ConfigError(f"--kv-ip {kv_ip} is no address of this machine: it has {', '.join(addresses)}")
    trust.check_address(kv_ip)


def network_variables(
    address: str, kind: DeviceKind, environ: Mapping[str, str], find: Callable[[str], str | None] = interface_of
) -> dict[str, str]:
    """Return what the collectives' libraries are told so that they take the interface of `address`.

    Nothing for loopback, for a name, and for an address that no interface here has; what is set stays as it is.
    """
    if not is_address(address) or canonical(address) == "localhost" or address in LOOPBACK:
        return {}
    interface = find(address)
    if interface is None:
        return {}
    wanted = interface_variables(traits_of(kind).collective, address, interface)
    return {name: value for name, value in wanted.items() if not environ.get(name)}
