"""Divide the cards of an operator's variable, such as CUDA_VISIBLE_DEVICES=2,3, among the instances of one cluster.

Each instance uses the first cards of the variable (device_map.py), so without this all would use the same cards.
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
    """Return the variable for each instance of `num_ranks` ranks on `device`; nothing if the operator sets none.

    Where the list is too short, instances get no card under `auto` (card_shortage.py), and GPUs that were requested
    are shared round-robin. Raises ConfigError, with both numbers, for requested NPUs, which cannot be shared,
    and if there are not enough cards for even one instance.
    """
    kind = find_kind(dev) if device == AUTO else kind_named(device)
    variable = traits_of(kind).visible_variable
    preset = None if variable is None else environ.get(variable)
    if variable is None or preset is None:
        return ({},) * num_instances
    names, needed = names_in(preset), num_instances * num_ranks
    if device == AUTO and len(names) < needed:
        return ({variable: ""},) * num_instances
    minimum = num_ranks if may_share(kind) else needed
    if len(names) < minimum:
        count = f"{needed}" if minimum == needed else f"at least {minimum}, and {needed} to share none"
        raise ConfigError(
            f"{variable}={preset!r} lists {len(names)} card{'' if len(names) == 1 else 's'}, but {num_instances} "
            f"instances of {num_ranks} rank{'' if num_ranks == 1 else 's'} need {count}: list more in the variable, "
            "or unset it"
        )
    dealt = (range(first, first + num_ranks) for first in range(0, needed, num_ranks))
    return tuple({variable: ",".join(names[place % len(names)] for place in places)} for places in dealt)


def names_in(preset: str) -> list[str]:
    """Return the cards that the variable names: those before the first negative one, as in CUDA."""
    names = (name.strip() for name in preset.split(",") if name.strip())
    return list(takewhile(lambda name: not name.startswith("-"), names))
