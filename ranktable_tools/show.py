"""Draw a table: its members and the connections between them."""

from collections.abc import Iterator, Sequence

from ranktable_tools.any_file import ReadFile
from ranktable_tools.digest import table_digest
from ranktable_tools.table_file import part_of
from ranktable_tools.tables import Table, TableInstance, TableServer, whole


def show(opened: ReadFile) -> list[str]:
    """Return the lines of a table of any dialect."""
    table = opened.reading.table
    drawn = _cluster_lines(opened, table) if table.kind == "cluster" else _instance_table(opened, table)
    return [*drawn, *(f"note: {note}" for note in opened.reading.notes)]


def _cluster_lines(opened: ReadFile, table: Table) -> Iterator[str]:
    yield f"{opened.path}: {opened.dialect.name}, {table.role_counts()}, {_state(opened, table)}"
    if table.schedulers:
        yield "  clients"
        yield "   | HTTP"
        for server in table.schedulers:
            yield f"  scheduler  {_server(server)}"
    stem = "   |" if table.schedulers else "    "
    names = list(_names(table.instances))
    for name, instance in zip(names, table.instances, strict=True):
        yield f"{stem}-- {name:<11} {_servers(instance)}"
    prefill = [name for name, instance in zip(names, table.instances, strict=True) if instance.role == "prefill"]
    decode = [name for name, instance in zip(names, table.instances, strict=True) if instance.role == "decode"]
    engines = {server.worker for instance in table.instances for server in instance.servers}
    if prefill and decode and len(engines) == 1:  # no KV goes from one engine to another
        yield f"  KV: {_name_range(prefill)} ==> {_name_range(decode)}"


def _instance_table(opened: ReadFile, table: Table) -> Iterator[str]:
    what = "one instance" if table.instances else "the scheduler"
    yield f"{opened.path}: {opened.dialect.name}, the table of {what}"
    servers = table.instances[0].servers if table.instances else table.schedulers
    for server in servers:
        yield f"  {_server(server)}"


def _state(opened: ReadFile, table: Table) -> str:
    if opened.dialect.name != "modelarts":
        return "use ranktable convert to make a table for pdserve"
    found = whole(part_of(table))
    return f"digest {table_digest(found)}" if found else "one host's table, to be merged"


def _names(instances: Sequence[TableInstance]) -> Iterator[str]:
    counts: dict[str, int] = {}
    for instance in instances:
        role = instance.role or "instance"
        yield f"{role} {counts.setdefault(role, 0)}"
        counts[role] += 1


def _name_range(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}..{len(names) - 1}"


def _servers(instance: TableInstance) -> str:
    return " + ".join(_server(server) for server in instance.servers)


def _server(server: TableServer) -> str:
    where = server.server_ip if server.server_port is None else f"{server.server_ip} port {server.server_port}"
    devices = f"  devices {','.join(server.device_ids)}" if server.devices else ""
    worker = "" if server.worker is None else f"  worker of {' '.join(filter(None, (server.worker, server.url)))}"
    pod = f"  super pod {server.super_pod_id}" if server.super_pod_id is not None else ""
    return f"{where}{devices}{worker}{pod}"
