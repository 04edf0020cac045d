"""Map each rank of an instance to a card, from the cards visible to this process and the table's physical ids.

cards visible to this process              what rank i uses
the variable is set already                the i-th card that the variable lists
the entry's own cards, in its order        card i; the variable stays unset
as many as the entry has, counted from 0   the same: a container renumbers its cards, so their ids mean nothing
any others                                 card i; the variable is set to the names of the entry's cards
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from devices.table import traits_of
from pdserve.preset_cards import names_in
from ranktable_tools.devices.cards import Card, shown_cards
from ranktable_tools.devices.kinds import DeviceKind
from ranktable_tools.devices.tools import Run, run_tool
from wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """The value to set the variable to, None to leave it, and a line that lists the card of each rank."""

    variable: str
    value: str | None
    line: str


def map_devices(
    kind: DeviceKind, device_ids: Sequence[str], environ: Mapping[str, str], *,
    run: Run = run_tool, dev: Path = Path("/dev"),
) -> DeviceMap | None:  # fmt: skip
    """Return the map of an instance's ranks, None on CPUs.

    Raises ConfigError with both numbers if there are fewer cards than ranks, and RanktableError if the driver's
    tool fails.
    """
    variable = traits_of(kind).visible_variable
    if variable is None:
        return None
    preset = environ.get(variable)
    if preset is not None:
        return _kept_preset(variable, preset, device_ids)
    cards = shown_cards(kind, environ, run, dev)
    if len(cards) < len(device_ids):
        raise ConfigError(
            f"{len(cards)} {kind} {'card is' if len(cards) == 1 else 'cards are'} visible here ({_id_list(cards)}), "
            f"but the table's entry has {len(device_ids)} ({','.join(device_ids)}): start the container with all of "
            "the entry's cards"
        )
    if _match_entry(cards, device_ids):
        line = _line(device_ids, [f"card {rank}" for rank in range(len(cards))])
        return DeviceMap(variable, None, f"{line} (every visible card; {variable} stays unset)")
    named = {card.device_id: card.name for card in cards}
    absent = [device_id for device_id in device_ids if device_id not in named]
    if absent:
        raise ConfigError(
            f"device {absent[0]} of the table is not among the {kind} cards visible here ({_id_list(cards)}): start "
            f"the instance on the device's host, expose only the entry's cards, or set {variable}"
        )
    if not all(named.values()):
        raise ConfigError(f"nvidia-smi does not identify the cards {_id_list(cards)}: set {variable}")
    value = ",".join(named[device_id] for device_id in device_ids)
    return DeviceMap(variable, value, f"{_line(device_ids, value.split(','))} ({variable}={value})")


def _match_entry(cards: Sequence[Card], device_ids: Sequence[str]) -> bool:
    """Return whether the visible cards are the entry's, in its order.

    Ids that count from 0, and device node numbers, may be a container's: unless they are the entry's ids in another
    order, they are taken for the entry's cards. Other ids are the machine's own.
    """
    shown = [card.device_id for card in cards]
    if len(shown) != len(device_ids) or shown == list(device_ids):
        return len(shown) == len(device_ids)
    is_counted = shown == [str(place) for place in range(len(shown))] or not all(card.name for card in cards)
    return is_counted and set(shown) != set(device_ids)


def _kept_preset(variable: str, preset: str, device_ids: Sequence[str]) -> DeviceMap:
    names = names_in(preset)
    if len(names) < len(device_ids):
        raise ConfigError(
            f"{variable}={preset!r} lists {len(names)} card{'' if len(names) == 1 else 's'}, but the table's entry has "
            f"{len(device_ids)} ({','.join(device_ids)}): list as many in the variable, or unset it"
        )
    return DeviceMap(variable, None, f"{_line(device_ids, names)} ({variable}={preset}, already set)")


def _line(device_ids: Sequence[str], names: Sequence[str]) -> str:
    pairs = (f"rank {rank} = device {device_id} on {name}" for rank, (device_id, name) in
             enumerate(zip(device_ids, names, strict=False)))  # fmt: skip
    return "devices: " + ", ".join(pairs)


def _id_list(cards: Sequence[Card]) -> str:
    return ",".join(card.device_id for card in cards) or "none"
