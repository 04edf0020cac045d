"""`pdserve up --device auto` on a machine with fewer cards than ranks: all ranks use the CPU, none share a card."""

from collections.abc import Mapping
from pathlib import Path

from devices.table import AUTO, traits_of
from pdserve.preset_cards import names_in
from ranktable_tools.devices.cards import shown_cards
from ranktable_tools.devices.kinds import find_kind
from ranktable_tools.devices.tools import Run, run_tool
from ranktable_tools.errors import RanktableError


def why_cpu(
    device: str, num_ranks: int, environ: Mapping[str, str], *, run: Run = run_tool, dev: Path = Path("/dev")
) -> str | None:  # fmt: skip
    """Return why `num_ranks` ranks under `auto` use the CPU although cards are visible, None if they fit the cards."""
    kind = find_kind(dev)
    variable = traits_of(kind).visible_variable
    if device != AUTO or variable is None:
        return None
    preset = environ.get(variable)
    if preset is not None:
        given = len(names_in(preset))
        return f"there are more ranks ({num_ranks}) than cards in {variable} ({given})" if given < num_ranks else None
    try:
        shown = len(shown_cards(kind, environ, run, dev))
    except RanktableError:
        return None  # each instance queries the cards again and reports the error
    return f"there are more ranks ({num_ranks}) than visible {kind} cards ({shown})" if shown < num_ranks else None
