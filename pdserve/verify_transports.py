"""The KV transports that two devices of this machine can run, and why they cannot run the others."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from devices.table import find_kind
from kvtransfer.transport_table import NAMES, make_transports, mismatch
from pdserve.verify_devices import DeviceKindPair
from ranktable_tools.devices.cards import shown_cards
from ranktable_tools.devices.kinds import kind_named
from wire.errors import ConfigError
from wire.kv_layout import KvTensor, PoolLayout

EACH = "each"
_TENSORS = (KvTensor(0, "k", 1, 16, "float32"),)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The transports to verify, best first, and the reason for each requested one that cannot run."""

    names: tuple[str, ...]
    lacking: Mapping[str, str]


def choose(requested: str, names: Sequence[str] = NAMES, pair: DeviceKindPair | None = None) -> Chosen:
    """Return the requested transport, or all that run between pools on these two devices (default: the CPU).

    Raises ConfigError for a named one that this machine lacks, and if none can run.
    """
    ends = pair or DeviceKindPair()
    lacking = {
        name: why for name in names if requested in (EACH, name) and (why := _why_unusable(name, ends)) is not None
    }
    if requested in lacking:
        raise ConfigError(f"--transport {requested} cannot run here: {lacking[requested]}")
    usable = tuple(name for name in names if requested in (EACH, name) and name not in lacking)
    if not usable:
        raise ConfigError(f"no transport can run here: {'; '.join(f'{name}: {why}' for name, why in lacking.items())}")
    return Chosen(usable, lacking)


def _why_unusable(name: str, pair: DeviceKindPair) -> str | None:
    """Return why an instance on either device could not use transport `name`, None if both can."""
    kinds = dict.fromkeys((pair.prefill, pair.decode))
    for kind in kinds:
        why = _lacking_on(name, kind)
        if why is not None:
            return why
    one, other = (find_kind(kind).traits for kind in (pair.prefill, pair.decode))
    is_card = pair.is_alike and not one.pools_on_host
    on_one_card = is_card and len(shown_cards(kind_named(pair.prefill), os.environ)) < 2
    return mismatch(name, one, other, on_one_card=on_one_card)


def _lacking_on(name: str, kind: str) -> str | None:
    pool = find_kind(kind).open().make_pool(PoolLayout(_TENSORS, num_blocks=1, block_size=16))
    try:
        make_transports((name,), pool)
    except ConfigError as error:
        return str(error).removeprefix(f"--kv-transport {name}: ")
    finally:
        pool.close()
    return None
