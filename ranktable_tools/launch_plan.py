"""Resolve the guide's environment variables into what one process is: its role, its entry, its peers."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from ranktable_tools.core_share import CoreShare, core_share
from ranktable_tools.digest import table_digest
from ranktable_tools.errors import RanktableError
from ranktable_tools.matching import find_own_entry
from ranktable_tools.node_ports import InstanceAddress, instance_addresses
from ranktable_tools.table_file import read_global, read_local
from ranktable_tools.tables import GlobalTable, InstanceEntry, LocalTable, Role, TableServer

__all__ = ["CoreShare", "InstanceAddress", "LaunchPlan", "core_share", "resolve"]

GLOBAL_VARIABLE = "GLOBAL_RANK_TABLE_FILE_PATH"
LOCAL_VARIABLE = "RANK_TABLE_FILE_PATH"

_Table = TypeVar("_Table", GlobalTable, LocalTable)


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What one process is: its role, its own entry of the table, that entry's index in global order and its name.

    The scheduler's own entry is group 0's; it has no index and no name, and it alone has `instance_addresses`. `notes`
    and `warnings` are for the log. `share_devices` and `has_node_ports` (NODE_PORTS is set for this process) say how
    the table was read, for code that reads it again.
    """

    role: Role
    global_table: GlobalTable
    global_path: str
    local_path: str
    table_digest: str
    own: TableServer
    index: int | None
    name: str | None = None
    instance_addresses: tuple[InstanceAddress, ...] = ()
    use_openai: bool = True
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    share_devices: bool = False
    has_node_ports: bool = False


def resolve(environ: Mapping[str, str], *, share_devices: bool = False) -> LaunchPlan:
    """Return the plan that the environment and its two tables describe; `share_devices` lets two instances share a GPU.

    Raises RanktableError naming the variable, the file, the place and the value.
    """
    global_path, global_notes = _path(environ, GLOBAL_VARIABLE, "global_ranktable_<ip>.json")
    local_path, local_notes = _path(environ, LOCAL_VARIABLE, "local_ranktable_<ip>_<ids or host>.json")
    table = _read(GLOBAL_VARIABLE, global_path, lambda path: read_global(path, share_devices=share_devices))
    local = _read(LOCAL_VARIABLE, local_path, read_local)
    try:
        entry = find_own_entry(local, table)
    except RanktableError as error:
        raise RanktableError(f"{LOCAL_VARIABLE}: {local_path} {error} ({global_path})") from error
    notes = (*global_notes, *local_notes)
    if entry is None:
        plan = _scheduler_plan(environ, table, global_path, local_path, notes)
    else:
        plan = _instance_plan(entry, table, global_path, local_path, notes)
    return replace(plan, share_devices=share_devices, has_node_ports="NODE_PORTS" in environ)


def _scheduler_plan(
    environ: Mapping[str, str], table: GlobalTable, global_path: str, local_path: str, notes: tuple[str, ...]
) -> LaunchPlan:
    addresses, warnings = instance_addresses(table, environ.get("NODE_PORTS"))
    return LaunchPlan(
        role="scheduler",
        global_table=table,
        global_path=global_path,
        local_path=local_path,
        table_digest=table_digest(table),
        own=table.scheduler,
        index=None,
        instance_addresses=addresses,
        use_openai=_use_openai(environ),
        notes=notes,
        warnings=warnings,
    )


def _instance_plan(
    entry: InstanceEntry, table: GlobalTable, global_path: str, local_path: str, notes: tuple[str, ...]
) -> LaunchPlan:
    return LaunchPlan(
        role=entry.role,
        global_table=table,
        global_path=global_path,
        local_path=local_path,
        table_digest=table_digest(table),
        own=entry.server,
        index=entry.index,
        name=entry.name,
        notes=notes,
    )


def _path(environ: Mapping[str, str], variable: str, example: str) -> tuple[str, tuple[str, ...]]:
    """Return the path in `variable`; the guide's typo `rank_table` for `ranktable` is corrected, with a note."""
    path = environ.get(variable, "")
    if not path:
        raise RanktableError(f"{variable} is not set: set it to the path of {example}")
    if not os.path.exists(path):
        folder, name = os.path.split(path)
        for wrong, right in (("_rank_table_", "_ranktable_"), ("_ranktable_", "_rank_table_")):
            corrected = os.path.join(folder, name.replace(wrong, right))
            if wrong in name and os.path.exists(corrected):
                return corrected, (f"{variable}: there is no {path}; read {corrected}",)
    return path, ()


def _read(variable: str, path: str, read: Callable[[str], _Table]) -> _Table:
    try:
        return read(path)
    except RanktableError as error:
        message = f"{variable}: {error}"
        raise RanktableError(message, code=error.code, json_path=error.json_path, value=error.value) from error


def _use_openai(environ: Mapping[str, str]) -> bool:
    value = environ.get("USE_OPENAI", "1")
    if value not in ("0", "1"):
        message = "must be 1 (the OpenAI API, the default) or 0 (/generate)"
        raise RanktableError(f'USE_OPENAI is "{value}": {message}')
    return value == "1"
