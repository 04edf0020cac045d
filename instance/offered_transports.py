"""The KV transports that an instance offers, and why it lacks the others; `pdserve links` prints them."""

from collections.abc import Mapping, Sequence

from devices.collectives import collective_of, setting_of_launch_order, setting_that_exits
from kvtransfer.device_memory import device_memory
from kvtransfer.interface import PoolMemory
from kvtransfer.process_group.devices import device_of
from kvtransfer.transport_table import NAMES, TRAITS, default_names, make_transports, transports_of
from telemetry.logs import EventLogger
from wire.errors import ConfigError

_log = EventLogger("instance")


def describe_transports(named: Sequence[str], memory: PoolMemory) -> tuple[str, ...]:
    """Return the transports, best first, in the form of InstanceDescription; `named` are those of --kv-transport."""
    defaults, chosen = default_names(device_of(memory)), transports_of(named)
    names, unnamed = [name for name in NAMES if name in (*defaults, *chosen)], "not named in --kv-transport"
    whys = {name: unnamed if chosen and name not in chosen else _why_missing(name, memory) for name in names}
    return tuple(f"{name}: {why}" if (why := whys[name]) else name for name in names)


def _why_missing(name: str, memory: PoolMemory) -> str:
    try:
        make_transports([name], memory)
    except ConfigError as error:
        return str(error).removeprefix(f"--kv-transport {name}: ")
    return ""


def warn_of_copies(named: Sequence[str], memory: PoolMemory) -> None:
    """Log once, with the reasons, if the KV of a device can only be copied through host memory at both ends."""
    offered, device = [transport.traits for transport in make_transports(named, memory)], device_of(memory)
    if device_memory(memory) is not None and all(traits.through_host(device) for traits in offered):
        reasons = "; ".join(text for text in describe_transports(named, memory) if ": " in text)
        _log.warning("kv_through_host", device=device, reasons=reasons)


def warn_of_slow_set_up(named: Sequence[str], memory: PoolMemory) -> None:
    """Log once if prompts to other hosts must wait for a slow set-up, because no other transport carries them."""
    offered, device = [transport.traits for transport in make_transports(named, memory)], device_of(memory)
    collective, slow = collective_of(device), [one.name for one in offered if one.is_slow(device)]
    others = [one for one in offered if one.name not in slow and not (one.one_host or one.measured_first)]
    if collective is not None and slow and not others:
        cure = "add tcp to --kv-transport: it carries prompts until the link is up"
        _log.warning(
            "kv_waits_for_set_up", transport=slow[0], library=collective.name, seconds=collective.make_s, cure=cure
        )


def warn_of_settings(named: Sequence[str], memory: PoolMemory, num_ranks: int, environ: Mapping[str, str]) -> None:
    """Log each of the user's environment variables that can make process group operations fail or end this process."""
    collective = collective_of(device_of(memory))
    if collective is None:
        return
    exits, order = setting_that_exits(collective, environ), setting_of_launch_order(collective, environ)
    if exits is None and order is None:
        return
    is_linked = any(one.traits.same == "collective" for one in make_transports(named, memory))
    has_links = is_linked and not collective.own_process
    if exits is not None and (num_ranks > 1 or has_links):
        consequence = "a peer that dies ends this process, not only its link; 0, the default, prevents that"
        _log.warning("failed_operation_exits", setting=exits, consequence=consequence)
    if order is not None and num_ranks > 1 and has_links:
        consequence = (
            "sums over ranks and KV links are launched by two threads, and operations of either may fail; "
            "0, the default, prevents that"
        )
        _log.warning("launches_race", setting=order, consequence=consequence)


def check_named(named: Sequence[str], memory: PoolMemory) -> None:
    """Raise ConfigError, with the remedy, if --kv-transport names a transport that this machine or pool lacks."""
    for name, transport in zip(named, transports_of(named), strict=True):
        if why := _why_missing(name, memory):
            purpose = f", which {TRAITS[transport].purpose}," if TRAITS[transport].purpose else ""
            raise ConfigError(
                f"--kv-transport {name}: {why}; leave {name}{purpose} out of --kv-transport on this machine"
            )
