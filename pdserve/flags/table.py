"""The table of all vLLM flags, by name and by short name."""

import difflib
from collections.abc import Iterable
from typing import Final

from pdserve.flags.adapter_and_trace_rows import ADAPTER_AND_TRACE_ROWS
from pdserve.flags.engine_args_rows import ENGINE_ARGS_ROWS
from pdserve.flags.engine_rows import ENGINE_ROWS
from pdserve.flags.recent_rows import RECENT_ROWS
from pdserve.flags.row import Arity, FlagVerdict, VllmFlag, no_effect, refused
from pdserve.flags.server_rows import SERVER_ROWS

ROWS: Final[tuple[VllmFlag, ...]] = (
    *ENGINE_ROWS,
    *SERVER_ROWS,
    *ADAPTER_AND_TRACE_ROWS,
    *RECENT_ROWS,
    *ENGINE_ARGS_ROWS,
)
_BY_NAME: Final = {name: row for row in ROWS for name in (row.name, row.short) if name is not None}


def find(name: str) -> VllmFlag | None:
    """Return the row of a flag, also with `_` for `-` as in vLLM; None if there is none."""
    return _BY_NAME.get(name) or _BY_NAME.get(dashed(name))


def find_opposite(name: str) -> VllmFlag | None:
    """Return the row of `--no-X` where vLLM's `--X` is a switch: without effect, unless `X` cannot be off."""
    row = find("--" + dashed(name)[5:]) if dashed(name).startswith("--no-") else None
    if row is None or row.arity not in (Arity.NOTHING, Arity.MAYBE):
        return None
    if not row.accepts_value("false"):
        return refused(dashed(name), row.why, Arity.NOTHING)
    return no_effect(dashed(name), row.why or f"it is off without {row.name}", Arity.NOTHING)


def dashed(name: str) -> str:
    """Return a long flag with dashes for underscores."""
    return "--" + name[2:].replace("_", "-") if name.startswith("--") else name


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a `did you mean` hint for `name`, empty if no flag is similar; refused flags are never proposed."""
    taken = {row.name for row in ROWS if row.verdict is not FlagVerdict.REFUSED}
    near = difflib.get_close_matches(dashed(name), sorted({*known, *taken}), n=1)
    return f": did you mean {near[0]}?" if near else ""
