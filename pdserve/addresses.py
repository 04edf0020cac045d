"""The addresses of one instance: its listen address, its KV address, and the interface of HCCL, NCCL and gloo."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from devices.network import interface_variables
from devices.table import traits_of
from flags.options import EngineOptions
from ranktable_tools.addresses import canonical, is_address, own_address, resolve
from ranktable_tools.devices.kinds import DeviceKind
from ranktable_tools.interfaces import interface_addresses, interface_of
from wire.errors import ConfigError

if TYPE_CHECKING:
    from security.trust import Trust  # imports grpc, which a container with vLLM alone may lack

_DEFAULT_HOST: Final = EngineOptions().host
_LOOPBACK_NET: Final = "127."


def with_own_address(options: EngineOptions, server_ip: str) -> EngineOptions:
    """Return the options with --ip as the address to listen on, unless --host sets another one.

    Raises ConfigError, with both addresses, if --ip differs from the entry's address, to which the scheduler connects.
    """
    if options.ip is None:
        return options
    if canonical(options.ip) != canonical(server_ip):
        raise ConfigError(
            f"--ip {options.ip} is not server_ip {server_ip} of this ranktable entry, to which the scheduler "
            "connects: set both to the same address"
        )
    return replace(options, host=options.ip) if options.host == _DEFAULT_HOST else options


def check_kv_address(
    kv_ip: str | None, trust: "Trust", own: Callable[[], tuple[str, ...]] = interface_addresses
) -> None:
    """Raise ConfigError unless --kv-ip is an address of this machine, Incompatible unless peers accept it."""
    if kv_ip is None:
        return
    if not is_address(kv_ip):
        raise ConfigError(f"--kv-ip {kv_ip!r} is not an IP address such as 10.0.1.18")
    addresses = tuple(dict.fromkeys((*own(), "127.0.0.1", "::1")))
    if kv_ip not in addresses:
        raise ConfigError(f"--kv-ip {kv_ip} is not an address of this machine, which has {', '.join(addresses)}")
    trust.check_address(kv_ip)


def network_variables(
    address: str, kind: DeviceKind, environ: Mapping[str, str], find: Callable[[str], str | None] = interface_of,
    look_up: Callable[[str], frozenset[str]] = resolve, own: Callable[[], str] = own_address,
) -> dict[str, str]:  # fmt: skip
    """Return the variables that make the collective libraries use the interface of `address`, which may be a name.

    If no interface has the address, as behind NAT, the interface of the default route is used: without the variables,
    NCCL's links would use loopback, as the instance's ranks do. A loopback address needs no variables; those that are
    already set are left out.
    """
    if is_address(address):
        addresses = [canonical(address)]
    else:  # Debian's /etc/hosts maps the machine's own name to 127.0.1.1
        addresses = [one for one in sorted(look_up(address)) if not one.startswith(_LOOPBACK_NET)]
    if any(one == "localhost" or one.startswith(_LOOPBACK_NET) for one in addresses):
        return {}
    for one in (*addresses, own()):
        interface = find(one)
        if interface not in (None, "lo"):
            wanted = interface_variables(traits_of(kind).collective, one, interface)
            return {name: value for name, value in wanted.items() if not environ.get(name)}
    return {}
