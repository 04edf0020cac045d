"""The KV transports that an instance offers, and why it lacks the others; `pdserve links` prints them."""

from collections.abc import Sequence

from kvtransfer.interface import PoolMemory
from kvtransfer.transports import DEFAULT_NAMES, NAMES, make_transports
from wire.errors import ConfigError


def describe_transports(named: Sequence[str], memory: PoolMemory) -> tuple[str, ...]:
    """Return all transports, best first, in the form of InstanceDescription; `named` are those of --kv-transport."""
    return tuple(f"{name}: {why}" if (why := _why_missing(name, named, memory)) else name for name in NAMES)


def _why_missing(name: str, named: Sequence[str], memory: PoolMemory) -> str:
    if name not in (named or DEFAULT_NAMES):
        return "not named in --kv-transport"
    try:
        make_transports([name], memory)
    except ConfigError as error:
        return str(error).removeprefix(f"--kv-transport {name}: ")
    return ""


def check_named(named: Sequence[str], memory: PoolMemory) -> None:
    """Raise ConfigError, with the remedy, if --kv-transport names a transport that this machine or pool lacks."""
    for name in named:
        if why := _why_missing(name, named, memory):
            what_for = ", which moves KV between the GPUs of a host," if name == "cuda_ipc" else ""
            raise ConfigError(
                f"--kv-transport {name}: {why}; leave {name}{what_for} out of --kv-transport on this machine"
            )
