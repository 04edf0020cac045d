"""Read ranktable files whole and checked, and write them."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from ranktable_tools.checks import check_across
from ranktable_tools.document import Node, Problem
from ranktable_tools.errors import RanktableError
from ranktable_tools.json_file import read_json, write_private
from ranktable_tools.modelarts import (
    PlacedGroup,
    check_group_count,
    global_text,
    local_text,
    parse_groups,
    parse_local,
)
from ranktable_tools.tables import GlobalTable, LocalTable, Server, TablePart, whole


def read_global(path: str) -> GlobalTable:
    """Return the whole global table in `path`. Raises RanktableError naming file, place and value."""
    problems, table = examine_global(path)
    if table is None:
        raise _refusal(path, problems)
    return table


def read_part(path: str) -> TablePart:
    """Return the global table in `path`, groups may be missing. Raises RanktableError naming file, place and value."""
    problems, part = examine_part(path)
    if part is None:
        raise _refusal(path, problems)
    return part


def read_local(path: str) -> LocalTable:
    """Return the local table in `path`. Raises RanktableError naming file, place and value."""
    problems, table = examine_local(path)
    if table is None:
        raise _refusal(path, problems)
    return table


def examine_global(path: str) -> tuple[list[Problem], GlobalTable | None]:
    """Return every problem of a whole global table, and the table when there is none."""
    root = Node(read_json(path), "", [])
    check_group_count(root)
    part = _part(root)
    table = None if part is None else whole(part)
    return root.problems, table


def examine_part(path: str) -> tuple[list[Problem], TablePart | None]:
    """Return every problem of one host's global table, and the table when there is none."""
    root = Node(read_json(path), "", [])
    return root.problems, _part(root)


def examine_local(path: str) -> tuple[list[Problem], LocalTable | None]:
    """Return every problem of a local table, and the table when there is none."""
    root = Node(read_json(path), "", [])
    placed = parse_local(root)
    if placed is None or root.problems:
        return root.problems, None
    return [], LocalTable(placed.server)


def is_global(path: str) -> bool:
    """Tell whether the file looks like a global table."""
    return Node(read_json(path), "", []).has("server_group_list")


def write_global(path: Path, table: GlobalTable | TablePart) -> None:
    """Write a global table, mode 0600, by an atomic rename."""
    write_private(path, global_text(table))


def write_local(path: Path, table: LocalTable) -> None:
    """Write a local table, mode 0600, by an atomic rename."""
    write_private(path, local_text(table))


def _part(root: Node) -> TablePart | None:
    groups = parse_groups(root)
    root.problems.extend(check_across([placed for group in groups for placed in group.servers]))
    if root.problems:
        return None
    schedulers = _servers(groups, "0")
    return TablePart(schedulers[0] if schedulers else None, _servers(groups, "1"), _servers(groups, "2"))


def _servers(groups: Iterable[PlacedGroup], group_id: str) -> tuple[Server, ...]:
    return tuple(placed.server for group in groups if group.group_id == group_id for placed in group.servers)


def _refusal(path: str, problems: Sequence[Problem]) -> RanktableError:
    more = f" (and {len(problems) - 1} more: ranktable lint {path})" if len(problems) > 1 else ""
    return RanktableError(f"{path}: {problems[0]}{more}")
