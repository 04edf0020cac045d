"""Which transports of the KV hop two devices of this machine can run, and why they cannot run the others."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from devices.collectives import COLLECTIVES
from devices.table import find_kind
from kvtransfer.transports import NAMES, make_transports
from pdserve.verify_devices import DeviceKindPair
from ranktable_tools.devices.cards import shown_cards
from ranktable_tools.devices.kinds import kind_named
from wire.errors import ConfigError
from wire.kv_layout import KvTensor, PoolLayout

EACH = "each"
_TENSORS = (KvTensor(0, "k", 1, 16, "float32"),)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The transports to verify, best first, and in words why the others of those asked for are not among them."""

    names: tuple[str, ...]
    lacking: Mapping[str, str]


def choose(asked: str, names: Sequence[str] = NAMES, pair: DeviceKindPair | None = None) -> Chosen:
    """Return the one asked for, or all that run between pools on these two devices (none: on the CPU).

    Raises ConfigError for one asked for by name that this machine lacks, and when there is none at all.
    """
    ends = pair or DeviceKindPair()
    lacking = {name: why for name in names if asked in (EACH, name) and (why := _lacking(name, ends)) is not None}
    if asked in lacking:
        raise ConfigError(f"--transport {asked} cannot run here: {lacking[asked]}")
    usable = tuple(name for name in names if asked in (EACH, name) and name not in lacking)
    if not usable:
        raise ConfigError(f"no transport can run here: {'; '.join(f'{name}: {why}' for name, why in lacking.items())}")
    return Chosen(usable, lacking)


def _lacking(name: str, pair: DeviceKindPair) -> str | None:
    """Say what `name` lacks here, as an instance on either device would that is told to use it."""
    for kind in dict.fromkeys((pair.prefill, pair.decode)):
        why = _lacking_on(name, kind)
        if why is not None:
            return why
    return _in_groups(pair) if name == "process_group" else None


def _lacking_on(name: str, kind: str) -> str | None:
    pool = find_kind(kind).open().make_pool(PoolLayout(_TENSORS, num_blocks=1, block_size=16))
    try:
        make_transports((name,), pool)
    except ConfigError as error:
        return str(error).removeprefix(f"--kv-transport {name}: ")
    finally:
        pool.close()
    return None


def _in_groups(pair: DeviceKindPair) -> str | None:
    one, other = (find_kind(kind).traits.collective for kind in (pair.prefill, pair.decode))
    if one != other:
        return f"groups are made by {one} on {pair.prefill}, by {other} on {pair.decode}"
    if not COLLECTIVES[one].on_host and len(shown_cards(kind_named(pair.prefill), os.environ)) < 2:
        return f"{one} takes one rank a card, and both ends are on the only one"
    return None
