"""The cards that an operator's variable shows, as CUDA_VISIBLE_DEVICES=2,3, dealt out to the instances of one cluster.

Each instance obeys the variable (device_map.py): given all of it, every one would take its first cards.
"""

from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

from devices.table import AUTO, traits_of
from ranktable_tools.devices.kinds import find_kind, kind_named, may_share
from wire.errors import ConfigError


def deal_to_instances(
    device: str, num_instances: int, num_ranks: int, environ: Mapping[str, str], *, dev: Path = Path("/dev")
) -> tuple[Mapping[str, str], ...]:
    """Return what each instance of `num_ranks` ranks on `device` is to have in its environment; nothing if none is set.

    Where the list is too short, each is shown no card under `auto` (card_shortage.py), and GPUs that were requested
    are shared in turn. Raises ConfigError, with both numbers, for NPUs that were asked for, which are in one instance
    alone, and where not even one instance has its cards.
    """
    kind = find_kind(dev) if device == AUTO else kind_named(device)
    variable = traits_of(kind).visible_variable
    preset = None if variable is None else environ.get(variable)
    if variable is None or preset is None:
        return ({},) * num_instances
    names, needed = names_in(preset), num_instances * num_ranks
    if device == AUTO and len(names) < needed:
        return ({variable: ""},) * num_instances
    least = num_ranks if may_share(kind) else needed
    if len(names) < least:
        raise ConfigError(
            f"{variable}={preset!r} shows {len(names)} cards, {num_instances} instances of {num_ranks} ranks take "
            f"{needed} ({least} at least): name them all in it, or unset it"
        )
    dealt = (range(first, first + num_ranks) for first in range(0, needed, num_ranks))
    return tuple({variable: ",".join(names[place % len(names)] for place in places)} for places in dealt)


def names_in(preset: str) -> list[str]:
    """Return the cards that a value of the variable names: those before the first negative one, as CUDA has it."""
    names = (name.strip() for name in preset.split(",") if name.strip())
    return list(takewhile(lambda name: not name.startswith("-"), names))
