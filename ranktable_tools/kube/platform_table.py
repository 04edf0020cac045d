"""Use a platform's table: wait until it is completed, find this pod in it, and write its local table.

Membership, order, addresses and devices are the platform's. A table in the guide's format is read in place; one of
another dialect is converted, and converted again whenever it changes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ranktable_tools.any_file import read_table
from ranktable_tools.convert import Conversion, convert
from ranktable_tools.dialects import modelarts
from ranktable_tools.dialects.dialect import ReadOptions
from ranktable_tools.errors import RanktableError
from ranktable_tools.json_file import read_json, write_private
from ranktable_tools.kube.names import TABLE_FILE
from ranktable_tools.kube.start import Start
from ranktable_tools.kube.waiting import NotYet, WaitLimits, wait_for
from ranktable_tools.table_file import read_global, write_local
from ranktable_tools.tables import GlobalTable, LocalTable, Role, Table, TableServer

_NOT_YET = ("unreadable", "not-completed", "not-json")
"""Rules that a table violates while the platform is still writing it."""


@dataclass(frozen=True, slots=True)
class PlatformTable:
    """A platform's file, its dialect (None: detected), and facts that the dialect does not contain.

    `port` is the port of every entry without one.
    """

    path: Path
    port: int | None = None
    dialect: str | None = None
    options: ReadOptions = field(default_factory=ReadOptions)
    api_server: str | None = None


def wait_for_platform(
    platform: PlatformTable, start: Start, limits: WaitLimits, present: Sequence[str] = ()
) -> tuple[Path, Path, GlobalTable]:
    """Return the local table's path, the table's path, and the table. Raises RanktableError, also on timeout.

    It waits for a table that is missing, not completed, or without this pod, but not for one with a mistake.
    `present` are this container's devices, which distinguish two instances of one role on one host.
    """
    return wait_for("the platform's table", lambda: _check_table(platform, start, present), limits)


def convert_if_changed(platform: PlatformTable, folder: Path) -> Path:
    """Return the file to read: the platform's own, or its updated conversion. Raises RanktableError."""
    _check_completed(platform.path)
    opened = read_table(str(platform.path), platform.dialect, platform.options)
    if opened.dialect is modelarts.DIALECT:
        return platform.path
    wanted = Conversion(modelarts.DIALECT, api_server=platform.api_server)
    text = convert(_with_ports(opened.reading.table, platform.port), wanted).text
    path = folder / TABLE_FILE
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_private(path, text)
    return path


def node_ports(table: GlobalTable, port: int) -> str | None:
    """Return NODE_PORTS for a table whose entries have no port; None if they have one."""
    if any(instance.server.server_port is not None for instance in table.instances):
        return None
    return ",".join(str(port) for _ in table.instances)


def _check_table(platform: PlatformTable, start: Start, present: Sequence[str]) -> tuple[Path, Path, GlobalTable]:
    try:
        path = convert_if_changed(platform, start.folder)
        table = read_global(str(path))
    except RanktableError as error:
        if error.code in _NOT_YET:
            raise NotYet(str(error)) from error
        raise
    local = start.folder / "own" / f"local_ranktable_{start.role}.json"
    write_local(local, LocalTable(_own_server(table, start.role, start.ip, present)))
    return local, path, table


def _with_ports(table: Table, port: int | None) -> Table:
    """Write the port into entries without one: the scheduler does not add a later instance without a port."""

    def ported(server: TableServer) -> TableServer:
        return server if server.server_port is not None else replace(server, server_port=port)

    instances = (replace(one, servers=tuple(map(ported, one.servers))) for one in table.instances)
    return replace(table, instances=tuple(instances))


def _check_completed(path: Path) -> None:
    """Check the status before detecting the dialect: a table that is not completed may have only its status."""
    document = read_json(str(path))
    status = document.get("status") if isinstance(document, dict) else None
    if status == "initializing":
        raise RanktableError(f"{path}: status is {status!r}: its writer is not done", code="not-completed")


def _own_server(table: GlobalTable, role: Role, ip: str, present: Sequence[str]) -> TableServer:
    found = list(_entries(table, role, ip))
    if len(found) > 1:
        found = [server for server in found if set(server.device_ids) == set(present)] or found
    if len(found) == 1:
        return found[0]
    if not found:
        raise NotYet(f"the table has no {role} at {ip}")
    listed = " and ".join(",".join(server.device_ids) for server in found)
    raise RanktableError(
        f"the table has {len(found)} {role} instances at {ip}, with the devices {listed}, but this container has "
        f"{','.join(present) or 'none'}: one pod is one instance; give the pods different addresses"
    )


def _entries(table: GlobalTable, role: Role, ip: str) -> Iterator[TableServer]:
    if role == "scheduler":
        if table.scheduler.server_ip == ip:
            yield table.scheduler
        return
    for instance in table.instances:
        if instance.role == role and instance.server.server_ip == ip:
            yield instance.server
