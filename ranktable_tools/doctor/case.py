"""The input of the checks: this machine, the given tables, and their entries on this machine."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ranktable_tools.addresses import HostComparer
from ranktable_tools.doctor.machine import Machine
from ranktable_tools.errors import RanktableError
from ranktable_tools.matching import find_own_entry
from ranktable_tools.node_ports import InstanceAddress, instance_addresses
from ranktable_tools.table_file import is_global, read_global, read_local
from ranktable_tools.tables import GlobalTable, InstanceEntry, LocalTable, TableServer

GLOBAL_VARIABLE = "GLOBAL_RANK_TABLE_FILE_PATH"
LOCAL_VARIABLE = "RANK_TABLE_FILE_PATH"
_SCHEDULER_PORT = 9000


@dataclass(frozen=True, slots=True)
class DoctorTables:
    """The given tables; `problem` is why one cannot be used, `own` is the instance of the local table.

    `share_devices`: the tables were read with two instances allowed on one GPU.
    """

    global_path: str | None = None
    local_path: str | None = None
    table: GlobalTable | None = None
    local: LocalTable | None = None
    own: InstanceEntry | None = None
    problem: str = ""
    share_devices: bool = False


@dataclass(frozen=True)
class DoctorInput:
    """The input of every check; `tls` are flags for pdserve commands that call instances.

    `connect_s` limits a connection attempt, `command_s` a pdserve command; after `pings_s` no further ping starts.
    """

    machine: Machine
    tables: DoctorTables
    url: str | None = None
    mib: int = 16
    tls: tuple[str, ...] = ()
    connect_s: float = 3.0
    command_s: float = 45.0
    pings_s: float = 30.0

    @cached_property
    def here(self) -> tuple[InstanceEntry, ...]:
        """The table's instances on this machine."""
        return tuple(one for one in self.instances if self.is_here(one.server.server_ip))

    @property
    def instances(self) -> tuple[InstanceEntry, ...]:
        """All instances of the table."""
        return () if self.tables.table is None else self.tables.table.instances

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of the table, each once, the scheduler's first."""
        table = self.tables.table
        return tuple(dict.fromkeys(server.server_ip for server in _servers(table))) if table is not None else ()

    @property
    def wanted_devices(self) -> tuple[str, ...]:
        """The device ids to check: the local table's, else those of the instances here, else all of this machine."""
        local = self.tables.local
        if local is not None:
            return local.server.device_ids
        wanted = dict.fromkeys(device_id for one in self.here for device_id in one.server.device_ids)
        return tuple(wanted) or self.machine.devices

    @property
    def base_url(self) -> str | None:
        """The scheduler's URL: the given one, else port 9000 on the table's scheduler."""
        if self.url is not None or self.tables.table is None:
            return self.url
        host = self.tables.table.scheduler.server_ip
        return f"http://[{host}]:{_SCHEDULER_PORT}" if ":" in host else f"http://{host}:{_SCHEDULER_PORT}"

    def is_here(self, host: str) -> bool:
        """Return whether a host of the table is this machine."""
        return self._make_comparer.same(host, "localhost")

    def addresses(self) -> tuple[InstanceAddress, ...]:
        """Return each instance's address. Raises RanktableError if neither NODE_PORTS nor the table has them."""
        if self.tables.table is None:
            return ()
        return instance_addresses(self.tables.table, self.machine.environ.get("NODE_PORTS"))[0]

    @cached_property
    def _make_comparer(self) -> HostComparer:
        return HostComparer()


def read_tables(files: Sequence[str], machine: Machine, *, share_devices: bool = False) -> DoctorTables:
    """Return the tables in `files`, or, if empty, those of the guide's variables."""
    global_path, local_path = _paths(files, machine)
    table, local, own, problem = None, None, None, ""
    try:
        table = None if global_path is None else read_global(global_path, share_devices=share_devices)
        local = None if local_path is None else read_local(local_path)
        if local is not None and table is not None:
            own = _find_own(local, table, f"{local_path} ", global_path or "")
    except RanktableError as error:
        problem = str(error)
    return DoctorTables(global_path, local_path, table, local, own, problem, share_devices)


def _find_own(local: LocalTable, table: GlobalTable, prefix: str, global_path: str) -> InstanceEntry | None:
    try:
        return find_own_entry(local, table)
    except RanktableError as error:
        raise RanktableError(f"{prefix}{error} ({global_path})") from error


def _paths(files: Sequence[str], machine: Machine) -> tuple[str | None, str | None]:
    if not files:
        named = [machine.environ.get(variable) or None for variable in (GLOBAL_VARIABLE, LOCAL_VARIABLE)]
        return named[0], named[1]
    globals_given = [path for path in files if is_global(path)]
    locals_given = [path for path in files if path not in globals_given]
    for kind, given in (("global", globals_given), ("local", locals_given)):
        if len(given) > 1:
            raise RanktableError(f"{len(given)} {kind} tables were given ({', '.join(given)}): pass at most one")
    return next(iter(globals_given), None), next(iter(locals_given), None)


def _servers(table: GlobalTable) -> list[TableServer]:
    return [table.scheduler, *(one.server for one in table.instances)]


def table_folder(tables: DoctorTables) -> str:
    """Return the folder of the global table."""
    return os.path.dirname(os.path.abspath(tables.global_path or "."))
