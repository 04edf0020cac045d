"""The transports by name, best first, and those used by default."""

from collections.abc import Callable, Sequence

from kvtransfer.cuda_ipc import CudaIpcTransport
from kvtransfer.interface import PoolMemory
from kvtransfer.mooncake import MooncakeTransport
from kvtransfer.process_group.transport import ProcessGroupTransport
from kvtransfer.shm import ShmTransport
from kvtransfer.tcp import TcpTransport
from kvtransfer.transport import Transport
from wire.errors import ConfigError
from wire.kv_transports import ONLY_NAMED

_MAKERS: dict[str, Callable[[PoolMemory], Transport]] = {
    "cuda_ipc": CudaIpcTransport,
    "shm": ShmTransport,
    "process_group": ProcessGroupTransport,
    "mooncake": MooncakeTransport,
    "tcp": TcpTransport,
}
NAMES = tuple(_MAKERS)
DEFAULT_NAMES = tuple(name for name in NAMES if name not in ONLY_NAMED)
READS_POOL = ("cuda_ipc", "shm")  # the receiver reads the sender's pool, some time after the announcement


def make_transports(
    names: Sequence[str], memory: PoolMemory, *, host: str | None = None, source: str | None = None
) -> tuple[Transport, ...]:
    """Return the named transports, best first; empty `names` select the default ones. Raises ConfigError.

    A named transport that this machine lacks is an error. With `host`, the address of this instance, a transport that
    will open further ports warns of them now. TCP connections are bound to `source`, an address of this machine.
    """
    for name in names:
        if name not in _MAKERS:
            raise ConfigError(f"KV transport {name!r} is not one of {', '.join(NAMES)}")
    transports = [_MAKERS[name](memory) for name in NAMES if name in (names or DEFAULT_NAMES)]
    for transport in transports:
        lacking = transport.unusable() if names else None
        if lacking is not None:
            raise ConfigError(f"--kv-transport {transport.name}: {lacking}")
    for transport in transports:
        if host is not None and isinstance(transport, MooncakeTransport):
            transport.open(host)
    for transport in transports:
        if isinstance(transport, (TcpTransport, ProcessGroupTransport, MooncakeTransport)):
            transport.source = source
    usable = tuple(transport for transport in transports if transport.unusable() is None)
    if not usable:
        raise ConfigError(f"none of the KV transports {', '.join(names or DEFAULT_NAMES)} works here")
    return usable
