"""Find mistakes across table files that are each valid: local tables against the global one, and NODE_PORTS."""

from collections.abc import Iterator, Sequence

from ranktable_tools.addresses import HostComparer
from ranktable_tools.any_file import ReadFile
from ranktable_tools.digest import table_digest
from ranktable_tools.errors import RanktableError
from ranktable_tools.finding import Finding
from ranktable_tools.matching import find_own_entry
from ranktable_tools.node_ports import parse_node_ports
from ranktable_tools.table_file import part_of
from ranktable_tools.tables import GlobalTable, InstanceEntry, LocalTable, TableServer, whole

_Global = tuple[str, GlobalTable]


def lint_across(files: Sequence[ReadFile], node_ports: str | None) -> list[Finding]:
    """Return the mistakes across these files; only those of the guide's dialect are compared."""
    tables = [(opened.path, table) for opened in files if (table := _as_global_table(opened)) is not None]
    findings = list(_differing_tables(tables))
    if len({table_digest(table) for _, table in tables}) == 1:
        findings += _lint_locals([opened for opened in files if _is_local(opened)], tables[0])
    if node_ports is not None:
        findings += _lint_node_ports(node_ports, tables)
    return findings


def _as_global_table(opened: ReadFile) -> GlobalTable | None:
    if opened.dialect.name != "modelarts" or opened.reading.kind != "cluster":
        return None
    return whole(part_of(opened.reading.table))


def _is_local(opened: ReadFile) -> bool:
    """Return whether this is a local table of one server; tables of merge-local have no entry in a global table."""
    is_local = opened.dialect.name == "modelarts" and opened.reading.kind == "instance"
    return is_local and len(list(opened.reading.servers)) == 1


def _differing_tables(tables: Sequence[_Global]) -> Iterator[Finding]:
    for path, table in tables[1:]:
        first_path, first = tables[0]
        if table_digest(table) != table_digest(first):
            message = f"differs from {first_path}: digest {table_digest(table)} here, {table_digest(first)} there"
            instead = "give every host the same file (ranktable diff shows the differences)"
            yield Finding(path, "error", "globals-differ", "", table_digest(table), message, instead)


def _lint_locals(files: Sequence[ReadFile], named: _Global) -> Iterator[Finding]:
    global_path, table = named
    path_by_entry: dict[int | None, str] = {}
    given: dict[str, None] = {}
    for opened in files:
        local = LocalTable(next(iter(opened.reading.servers)).server)
        try:
            entry = find_own_entry(local, table)
        except RanktableError as error:
            message, _, rest = str(error).partition("; ")
            yield Finding(
                opened.path, "error", "not-in-global", "server_list[0]", None, message, f"{rest} ({global_path})"
            )
            continue
        given[local.server.server_ip] = None
        yield from _other_port(opened.path, local.server, table.scheduler if entry is None else entry.server, named[0])
        index = None if entry is None else entry.index
        first = path_by_entry.setdefault(index, opened.path)
        if first != opened.path:
            message = f"is {entry or 'the scheduler'} of {global_path}, and so is {first}"
            yield Finding(opened.path, "error", "local-twice", "server_list[0]", None, message, "keep one of them")
    yield from _missing_local_tables(table, global_path, path_by_entry, list(given))


def _other_port(path: str, local: TableServer, entry: TableServer, global_path: str) -> Iterator[Finding]:
    """Yield a note if the ports of both tables differ: the process starts, with the global table's port."""
    if local.server_port is not None and entry.server_port is not None and local.server_port != entry.server_port:
        json_path = "server_list[0].server_port"
        message = f'{json_path} is "{local.server_port}", and {global_path} has "{entry.server_port}" for this entry'
        instead = "write the same port: the global table's is used"
        yield Finding(path, "note", "port-differs", json_path, str(local.server_port), message, instead)


def _missing_local_tables(
    table: GlobalTable, global_path: str, path_by_entry: dict[int | None, str], given: list[str]
) -> Iterator[Finding]:
    hosts = HostComparer()
    for instance in table.instances:
        if instance.index not in path_by_entry and any(hosts.same(instance.server.server_ip, host) for host in given):
            message = f"{instance.json_path} has no local table among these files: {_describe(instance)}"
            yield Finding(
                global_path, "note", "no-local", instance.json_path, None, message, "pass all tables of a host, or none"
            )


def _describe(instance: InstanceEntry) -> str:
    return f"{instance} on {instance.server.server_ip}, devices {','.join(instance.server.device_ids)}"


def _lint_node_ports(value: str, tables: Sequence[_Global]) -> Iterator[Finding]:
    for path, table in tables[:1]:
        try:
            ports = parse_node_ports(value, table)
        except RanktableError as error:
            instead = "write one port per instance, in table order"
            yield Finding(path, "error", "node-ports", "", value, str(error), instead)
            return
        for instance, port in zip(table.instances, ports, strict=True):
            own = instance.server.server_port
            if own is not None and own != port:
                message = (
                    f'{instance.json_path}.server_port is "{own}", and NODE_PORTS has {port} for {instance}: {value}'
                )
                instead = "write the ports in table order, all prefill instances and then all decode"
                yield Finding(path, "error", "node-ports", f"{instance.json_path}.server_port", own, message, instead)
                return
