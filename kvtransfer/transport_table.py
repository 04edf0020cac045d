"""The transports, best first, by name: how each is made, and its traits."""

from collections.abc import Callable, Sequence

from devices.collectives import COLLECTIVES
from devices.interface import Traits
from devices.table import KINDS, traits_of
from kvtransfer.cuda_ipc import CudaIpcTransport
from kvtransfer.interface import PoolMemory
from kvtransfer.mooncake import MooncakeTransport
from kvtransfer.process_group.devices import device_of
from kvtransfer.process_group.transport import ProcessGroupTransport
from kvtransfer.shm import ShmTransport
from kvtransfer.tcp import TcpTransport
from kvtransfer.transport_interface import Transport
from wire.errors import ConfigError

_CLASSES = (CudaIpcTransport, ShmTransport, MooncakeTransport, ProcessGroupTransport, TcpTransport)  # best first
_MAKERS: dict[str, Callable[[PoolMemory], Transport]] = {one.traits.name: one for one in _CLASSES}
TRAITS = {one.traits.name: one.traits for one in _CLASSES}
NAMES = tuple(TRAITS)
LIBRARIES = {
    library: name
    for name, traits in TRAITS.items()
    if traits.same is not None
    for kind in KINDS.values()
    if (library := getattr(kind.traits, traits.same)) not in NAMES
}
"""Values of --kv-transport for a transport over the library or protocol of one kind of device."""


def default_names(device: str) -> tuple[str, ...]:
    """Return the transports used without --kv-transport for a pool on a device such as "cuda:0", best first."""
    return tuple(name for name, traits in TRAITS.items() if traits.by_default(device))


def transports_of(values: Sequence[str], device: str | None = None) -> tuple[str, ...]:
    """Return the transports that values of --kv-transport name, on a device if it is known. Raises ConfigError."""
    for value in values:
        if value not in (*NAMES, *LIBRARIES):
            raise ConfigError(f"--kv-transport {value!r} is not one of {', '.join((*NAMES, *LIBRARIES))}")
        if value in LIBRARIES and device is not None:
            own = getattr(traits_of(device), str(TRAITS[LIBRARIES[value]].same))
            if own != value:
                raise ConfigError(f"--kv-transport {value}: a KV pool on {device} uses {own}")
    return tuple(LIBRARIES.get(value, value) for value in values)


def make_transports(
    values: Sequence[str], memory: PoolMemory, *, host: str | None = None, source: str | None = None
) -> tuple[Transport, ...]:
    """Return the transports that values of --kv-transport name, best first; the default ones if there are none.

    Raises ConfigError, also if this machine lacks a named one. `host` and `source`: see Transport.bind.
    """
    device = device_of(memory)
    names = transports_of(values, device) or default_names(device)
    made = {name: _MAKERS[name](memory) for name in NAMES if name in names}
    for value, name in zip(values, names, strict=False):
        if why := made[name].unusable():
            raise ConfigError(f"--kv-transport {value}: {why}")
    usable = tuple(transport for transport in made.values() if transport.unusable() is None)
    if not usable:
        raise ConfigError(f"none of the KV transports {', '.join(names)} works here")
    for transport in usable:
        transport.bind(host, source)
    return usable


def need_port(values: Sequence[str]) -> bool:
    """Return whether an instance with these --kv-transport values listens on a TCP port for KV; the default does."""
    return not values or not all(TRAITS[name].one_host for name in transports_of(values))


def mismatch(name: str, one: Traits, other: Traits, *, on_one_card: bool) -> str | None:
    """Return why this transport cannot connect devices with these traits, or None."""
    same = TRAITS[name].same
    if same is None:
        return None
    ours, theirs = getattr(one, same), getattr(other, same)
    if ours != theirs:
        return f"{name} uses {ours} on {one.kind} but {theirs} on {other.kind}"
    if same == "collective" and on_one_card and not COLLECTIVES[ours].on_host:
        return f"{ours} allows only one rank per card, but both ends are on the same card"
    return None
