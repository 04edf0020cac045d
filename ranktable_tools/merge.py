"""Merge the global tables of several hosts into one. Pure, except for resolving host names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ranktable_tools.errors import RanktableError
from ranktable_tools.reading import LocatedInstance, LocatedServer, TableReading
from ranktable_tools.rules.catalogue import errors
from ranktable_tools.rules.rule import RuleOptions
from ranktable_tools.tables import GlobalTable, TablePart, TableServer


@dataclass(frozen=True, slots=True)
class NamedPart:
    """One host's global table and the file it came from."""

    path: str
    part: TablePart


def check_enough(paths: Sequence[str], kind: Literal["global", "local"] = "global") -> None:
    """Raise RanktableError for fewer than two tables."""
    if len(paths) < 2:
        given = ", ".join(paths) or "none"
        # The exact text of the guide's own tool, kept for scripts that match it; so is the text about group_id 0 below.
        raise RanktableError(f"Ensure that there are two {kind} ranktable for merge mode. Given: {given}")


def merge(parts: Sequence[NamedPart], *, share_devices: bool = False) -> GlobalTable:
    """Return the merged table, servers in argument order. Raises RanktableError naming conflicting files."""
    scheduler = _only_scheduler(parts)
    _check_clashes(parts, share_devices)
    return GlobalTable(
        scheduler,
        _join_servers("prefill", [named.part.prefill for named in parts]),
        _join_servers("decode", [named.part.decode for named in parts]),
    )


def _only_scheduler(parts: Sequence[NamedPart]) -> TableServer:
    found = [(named.path, named.part.scheduler) for named in parts if named.part.scheduler is not None]
    if not found:
        raise RanktableError(
            f"no table has group_id 0, the scheduler: {', '.join(named.path for named in parts)}; "
            "generate one of them again with --api-server"
        )
    if len(found) > 1:
        raise RanktableError(
            "All global ranktable can contain only one group_id 0 field. "
            f"{' and '.join(path for path, _ in found)} have one each; keep the scheduler in one of them and generate "
            "the other again with --no-api-server (pd_ranktable_tools: without --api-server)"
        )
    return found[0][1]


def _check_clashes(parts: Sequence[NamedPart], share_devices: bool) -> None:
    instances = tuple(
        LocatedInstance(instance.role, (LocatedServer(instance.server, json_path),), json_path)
        for named in parts
        for instance in named.part.instances
        for json_path in (f"{named.path}: {instance.role}-{instance.number}",)
        if instance.role in ("prefill", "decode")
    )
    schedulers = tuple(
        LocatedServer(named.part.scheduler, f"{named.path}: scheduler")
        for named in parts
        if named.part.scheduler is not None
    )
    problems = errors(TableReading("modelarts", "cluster", schedulers, instances), RuleOptions(share_devices))
    if problems:
        raise RanktableError(str(problems[0]))


def _join_servers(role: str, lists: Sequence[tuple[TableServer, ...]]) -> tuple[TableServer, ...]:
    servers = tuple(server for servers in lists for server in servers)
    if not servers:
        raise RanktableError(f"no table has a {role} instance; generate one with --{role}-server-list")
    return servers
