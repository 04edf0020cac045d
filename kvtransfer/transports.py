"""The transports by name, best first, and which of them are used when none is named."""

from collections.abc import Callable, Sequence

from kvtransfer.interface import PoolMemory
from kvtransfer.process_group.transport import ProcessGroupTransport
from kvtransfer.shm import ShmTransport
from kvtransfer.tcp import TcpTransport
from kvtransfer.transport import Transport
from wire.errors import ConfigError

_MAKERS: dict[str, Callable[[PoolMemory], Transport]] = {
    "shm": ShmTransport,
    "process_group": ProcessGroupTransport,
    "tcp": TcpTransport,
}
NAMES = tuple(_MAKERS)
DEFAULT_NAMES = ("shm", "tcp")


def make_transports(names: Sequence[str], memory: PoolMemory) -> tuple[Transport, ...]:
    """Return the named transports, best first; `names` empty means the default ones. Raises ConfigError.

    A transport that this machine lacks is an error when it was named.
    """
    for name in names:
        if name not in _MAKERS:
            raise ConfigError(f"KV transport {name!r} is none of {', '.join(NAMES)}")
    transports = [_MAKERS[name](memory) for name in NAMES if name in (names or DEFAULT_NAMES)]
    for transport in transports:
        lacking = transport.unusable() if names else None
        if lacking is not None:
            raise ConfigError(f"--kv-transport {transport.name}: {lacking}")
    usable = tuple(transport for transport in transports if transport.unusable() is None)
    if not usable:
        raise ConfigError(f"none of the KV transports {', '.join(names or DEFAULT_NAMES)} works here")
    return usable
