"""The KV transports that an instance offers, and why it lacks the others; `pdserve links` prints them."""

from collections.abc import Sequence

from kvtransfer.interface import PoolMemory
from kvtransfer.transports import DEFAULT_NAMES, TRAITS, make_transports
from wire.errors import ConfigError


def describe_transports(named: Sequence[str], memory: PoolMemory) -> tuple[str, ...]:
    """Return the transports, best first, in the form of InstanceDescription; `named` are those of --kv-transport."""
    names = [name for name, traits in TRAITS.items() if traits.by_default or name in named]
    return tuple(f"{name}: {why}" if (why := _why_missing(name, named, memory)) else name for name in names)


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
            purpose = f", which {TRAITS[name].purpose}," if TRAITS[name].purpose else ""
            raise ConfigError(
                f"--kv-transport {name}: {why}; leave {name}{purpose} out of --kv-transport on this machine"
            )
