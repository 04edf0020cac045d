"""Read and validate ranktable files of the guide's dialect, and write them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from ranktable_tools.dialects import modelarts
from ranktable_tools.document import Node, Problem
from ranktable_tools.errors import RanktableError
from ranktable_tools.json_file import read_json, write_private
from ranktable_tools.reading import TableReading
from ranktable_tools.rules.catalogue import errors
from ranktable_tools.rules.rule import RuleOptions
from ranktable_tools.tables import GlobalTable, LocalTable, Table, TablePart, TableServer, whole

_KEYS = {"global": "server_group_list", "local": "server_list"}


def read_global(path: str, *, share_devices: bool = False) -> GlobalTable:
    """Return the complete global table in `path`. Raises RanktableError naming file, place and value."""
    problems, table = examine_global(path, share_devices=share_devices)
    if table is None:
        raise refusal(path, problems)
    return table


def read_part(path: str, *, share_devices: bool = False) -> TablePart:
    """Return the global table in `path`; groups may be missing. Raises RanktableError naming file, place and value."""
    root = _read_document(path, "global")
    reading = _check_table(root, modelarts.read_global, share_devices)
    if reading is None:
        raise refusal(path, root.problems)
    return part_of(reading.table)


def read_local(path: str) -> LocalTable:
    """Return the local table in `path`. Raises RanktableError naming file, place and value."""
    problems, table = examine_local(path)
    if table is None:
        raise refusal(path, problems)
    return table


def examine_global(path: str, *, share_devices: bool = False) -> tuple[list[Problem], GlobalTable | None]:
    """Return every problem of a complete global table, and the table if there is none."""
    root = _read_document(path, "global")
    modelarts.check_whole(root)
    reading = _check_table(root, modelarts.read_global, share_devices)
    return root.problems, None if reading is None else whole(part_of(reading.table))


def examine_local(path: str) -> tuple[list[Problem], LocalTable | None]:
    """Return every problem of a pdserve process's local table, and the table if there is none."""
    root = _read_document(path, "local")
    reading = modelarts.read_local(root)
    servers = [located.server for located in reading.servers]
    if len(servers) > 1:
        advice = (
            "must have 1, because pdserve cannot start an instance over several servers: write a local table for each "
            "server (tables of merge-local are for other tools)"
        )
        Node(len(servers), "server_list", root.problems).report("instance-over-servers", _servers(servers), advice)
    else:
        root.problems.extend(errors(reading, known=root.problems))
    return root.problems, None if root.problems else LocalTable(servers[0])


def is_global(path: str) -> bool:
    """Return whether the file looks like a global table."""
    return Node(read_json(path), "", []).has("server_group_list")


def write_global(path: Path, table: GlobalTable | TablePart) -> None:
    """Write a global table, mode 0600, by an atomic rename."""
    write_private(path, modelarts.global_text(table))


def write_local(path: Path, table: LocalTable) -> None:
    """Write a local table, mode 0600, by an atomic rename."""
    write_private(path, modelarts.local_text(table))


def part_of(table: Table) -> TablePart:
    """Return a cluster table, with one server per instance, as a TablePart, the type for starting and merging."""
    prefill, decode = (tuple(one.servers[0] for one in table.of_role(role)) for role in ("prefill", "decode"))
    return TablePart(table.schedulers[0] if table.schedulers else None, prefill, decode)


def refusal(path: str, problems: Sequence[Problem]) -> RanktableError:
    """Return the error of a file with these problems: the first one, and the number of others."""
    more = f" (and {len(problems) - 1} more: ranktable lint {path})" if len(problems) > 1 else ""
    first = problems[0]
    return RanktableError(f"{path}: {first}{more}", code=first.code, json_path=first.json_path, value=first.value)


def _read_document(path: str, wanted: Literal["global", "local"]) -> Node:
    """Return the document. Raises RanktableError for a table of the other kind."""
    root = Node(read_json(path), "", [])
    other: Literal["global", "local"] = "local" if wanted == "global" else "global"
    if root.has(_KEYS[other]) and not root.has(_KEYS[wanted]):
        message = f"is a {other} table, with {_KEYS[other]}; a {wanted} table is needed here, with {_KEYS[wanted]}"
        raise RanktableError(f"{path}: {message}", code="missing-key", json_path=_KEYS[wanted])
    return root


def _servers(servers: Sequence[TableServer]) -> str:
    return f"has {len(servers)} servers, {' and '.join(server.server_ip for server in servers)}"


def _check_table(root: Node, read: Callable[[Node], TableReading], share_devices: bool) -> TableReading | None:
    """Return the reading, or None if it breaks rules; problems are added to the node's list."""
    reading = read(root)
    root.problems.extend(errors(reading, RuleOptions(share_devices), root.problems))
    return None if root.problems else reading
