"""Find everything that is wrong with table files, each alone and local tables against the global one."""

from collections.abc import Sequence

from ranktable_tools.errors import RanktableError
from ranktable_tools.matching import find_own_entry
from ranktable_tools.table_file import examine_global, examine_local, is_global
from ranktable_tools.tables import GlobalTable, LocalTable


def lint(paths: Sequence[str]) -> list[str]:
    """Return every problem, one line each, naming file, place, value and cure; empty when all is well."""
    lines: list[str] = []
    global_tables: list[tuple[str, GlobalTable]] = []
    local_tables: list[tuple[str, LocalTable]] = []
    for path in paths:
        try:
            if is_global(path):
                problems, table = examine_global(path)
                global_tables += [] if table is None else [(path, table)]
            else:
                problems, local = examine_local(path)
                local_tables += [] if local is None else [(path, local)]
        except RanktableError as error:
            lines.append(str(error))
        else:
            lines += [f"{path}: {problem}" for problem in problems]
    if len(global_tables) == 1:
        lines += _unmatched(local_tables, *global_tables[0])
    return lines


def _unmatched(local_tables: Sequence[tuple[str, LocalTable]], global_path: str, table: GlobalTable) -> list[str]:
    lines = []
    for path, local in local_tables:
        try:
            find_own_entry(local, table)
        except RanktableError as error:
            lines.append(f"{path}: {error} ({global_path})")
    return lines
