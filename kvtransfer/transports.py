"""The transports, best first, by name: how each is made, and its traits."""

from collections.abc import Callable, Sequence

from devices.collectives import COLLECTIVES
from devices.interface import Traits
from kvtransfer.cuda_ipc import CudaIpcTransport
from kvtransfer.interface import PoolMemory
from kvtransfer.mooncake import MooncakeTransport
from kvtransfer.process_group.transport import ProcessGroupTransport
from kvtransfer.shm import ShmTransport
from kvtransfer.tcp import TcpTransport
from kvtransfer.transport import Transport
from wire.errors import ConfigError

_CLASSES = (CudaIpcTransport, ShmTransport, ProcessGroupTransport, MooncakeTransport, TcpTransport)  # best first
_MAKERS: dict[str, Callable[[PoolMemory], Transport]] = {one.traits.name: one for one in _CLASSES}
TRAITS = {one.traits.name: one.traits for one in _CLASSES}
NAMES = tuple(TRAITS)
DEFAULT_NAMES = tuple(name for name, traits in TRAITS.items() if traits.by_default)


def make_transports(
    names: Sequence[str], memory: PoolMemory, *, host: str | None = None, source: str | None = None
) -> tuple[Transport, ...]:
    """Return the named transports, best first; empty `names` select the default ones. Raises ConfigError.

    A named transport that this machine lacks is an error. `host` and `source`: see Transport.bind.
    """
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"KV transport {name!r} is not one of {', '.join(NAMES)}")
    transports = [_MAKERS[name](memory) for name in NAMES if name in (names or DEFAULT_NAMES)]
    for transport in transports:
        lacking = transport.unusable() if names else None
        if lacking is not None:
            raise ConfigError(f"--kv-transport {transport.traits.name}: {lacking}")
    usable = tuple(transport for transport in transports if transport.unusable() is None)
    if not usable:
        raise ConfigError(f"none of the KV transports {', '.join(names or DEFAULT_NAMES)} works here")
    for transport in usable:
        transport.bind(host, source)
    return usable


def need_port(names: Sequence[str]) -> bool:
    """Return whether an instance with these transports, none for the default ones, listens on a TCP port for KV."""
    return not all(TRAITS[name].one_host for name in names or DEFAULT_NAMES)


def mismatch(name: str, one: Traits, other: Traits, *, on_one_card: bool) -> str | None:
    """Return why this transport cannot connect devices with these traits, or None."""
    same = TRAITS[name].same
    if same is None:
        return None
    ours, theirs = getattr(one, same), getattr(other, same)
    if ours != theirs:
        return f"{name} uses {ours} on {one.kind} but {theirs} on {other.kind}"
    if same == "collective" and on_one_card and not COLLECTIVES[ours].on_host:
        return f"{ours} allows one rank per card, and both ends are on the only card"
    return None
