"""The tables as plain data: the scheduler, the instances and their devices."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

Role = Literal["scheduler", "prefill", "decode", "combined"]
MemberRole = Literal["prefill", "decode", "combined"]
InstanceRole = Literal["prefill", "decode"]
WorkerKind = Literal["vllm", "vllm-ascend"]
WORKER_KINDS: tuple[WorkerKind, ...] = get_args(WorkerKind)


@dataclass(frozen=True, slots=True)
class TableDevice:
    """One device of an instance: physical id, address on the device network, logical rank.

    Only an HCCL table of one host may omit the address; the fields after the rank come from other dialects.
    """

    device_id: str
    device_ip: str | None
    rank_id: str
    device_port: str | None = None
    super_device_id: str | None = None
    device_logical_id: str | None = None
    backup_device_ip: str | None = None
    backup_device_port: str | None = None
    host_port: str | None = None


@dataclass(frozen=True, slots=True)
class TableServer:
    """One server entry: an instance (or one of its hosts) and its devices, or, without devices, the scheduler.

    `worker`: another engine serves this entry, at `url` (default: server_ip and server_port) over HTTP; a worker
    that already runs may be listed without its devices, and in both groups if it has both roles. The fields after
    `url` come from other dialects.
    """

    server_id: str
    server_ip: str
    devices: tuple[TableDevice, ...] = ()
    server_port: int | None = None
    worker: WorkerKind | None = None
    url: str | None = None
    host_ip: str | None = None
    container_ip: str | None = None
    pod_name: str | None = None
    super_pod_id: str | None = None

    @property
    def device_ids(self) -> tuple[str, ...]:
        """The physical ids in table order."""
        return tuple(device.device_id for device in self.devices)


@dataclass(frozen=True, slots=True)
class InstanceEntry:
    """One instance of a table: `number` counts within its role, `index` over all, prefill first."""

    role: Role
    number: int
    index: int
    server: TableServer

    @property
    def name(self) -> str:
        """Its name in logs and messages: its role and its number within the role, such as `decode-0`."""
        return f"{self.role}-{self.number}"

    @property
    def json_path(self) -> str:
        """The JSON path of the entry in a complete table."""
        group, position = (2, self.number) if self.role == "decode" else (1, self.index)
        return f"server_group_list[{group}].server_list[{position}]"

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class TableInstance:
    """One instance of a table of any dialect, over one or more servers; role None if the table has none."""

    role: InstanceRole | None
    servers: tuple[TableServer, ...]

    @property
    def devices(self) -> tuple[TableDevice, ...]:
        """All devices, server by server."""
        return tuple(device for server in self.servers for device in server.devices)


@dataclass(frozen=True, slots=True)
class Table:
    """The content of a table of any dialect: the common model that every dialect is converted to and from.

    A `cluster` table lists schedulers and instances; an `instance` table describes one member to its processes:
    one instance without a role, or, without devices, the scheduler.
    """

    kind: Literal["cluster", "instance"]
    schedulers: tuple[TableServer, ...]
    instances: tuple[TableInstance, ...]

    def of_role(self, role: InstanceRole) -> tuple[TableInstance, ...]:
        """Return the instances of one role, in table order."""
        return tuple(instance for instance in self.instances if instance.role == role)

    def role_counts(self) -> str:
        """Return the number of instances as text, by role if the table has roles."""
        prefill, decode = len(self.of_role("prefill")), len(self.of_role("decode"))
        unknown = len(self.instances) - prefill - decode
        if unknown:
            return f"{unknown} instance{'s' if unknown > 1 else ''}, roles unknown"
        return f"{prefill} prefill, {decode} decode"


@dataclass(frozen=True, slots=True)
class TablePart:
    """A possibly incomplete table, such as one host's: any of the three groups may be missing until the merge."""

    scheduler: TableServer | None
    prefill: tuple[TableServer, ...]
    decode: tuple[TableServer, ...]

    @property
    def instances(self) -> tuple[InstanceEntry, ...]:
        """All instances in global order."""
        return tuple(_instances(self.prefill, self.decode))


@dataclass(frozen=True, slots=True)
class GlobalTable:
    """A complete table: one scheduler, at least one prefill and one decode instance."""

    scheduler: TableServer
    prefill: tuple[TableServer, ...]
    decode: tuple[TableServer, ...]

    @property
    def instances(self) -> tuple[InstanceEntry, ...]:
        """All instances in global order."""
        return tuple(_instances(self.prefill, self.decode))

    @property
    def members(self) -> tuple[InstanceEntry, ...]:
        """All instances in global order; a worker whose URL is in both groups is one `combined` member."""
        decode = {(one.worker, one.url) for one in self.decode if one.url is not None}
        both = {(one.worker, one.url) for one in self.prefill} & decode
        found, num_combined = [], 0
        for one in self.instances:
            if (one.server.worker, one.server.url) not in both:
                found.append(one)
            elif one.role == "prefill":
                found.append(replace(one, role="combined", number=num_combined))
                num_combined += 1
        return tuple(found)

    @property
    def part(self) -> TablePart:
        """The same table as a TablePart."""
        return TablePart(self.scheduler, self.prefill, self.decode)

    @property
    def table(self) -> Table:
        """The same table as a Table."""
        listed = (TableInstance(role, (one,)) for role, one in self._servers_by_role())
        return Table("cluster", (self.scheduler,), tuple(listed))

    def _servers_by_role(self) -> Iterator[tuple[InstanceRole, TableServer]]:
        yield from (("prefill", server) for server in self.prefill)
        yield from (("decode", server) for server in self.decode)


@dataclass(frozen=True, slots=True)
class LocalTable:
    """The table that describes one process to itself."""

    server: TableServer


def whole(part: TablePart) -> GlobalTable | None:
    """Return the part as a complete table, or None while a group is missing."""
    if part.scheduler is None or not part.prefill or not part.decode:
        return None
    return GlobalTable(part.scheduler, part.prefill, part.decode)


def _instances(prefill: tuple[TableServer, ...], decode: tuple[TableServer, ...]) -> Iterator[InstanceEntry]:
    for number, server in enumerate(prefill):
        yield InstanceEntry("prefill", number, number, server)
    for number, server in enumerate(decode):
        yield InstanceEntry("decode", number, len(prefill) + number, server)
