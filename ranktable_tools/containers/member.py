"""Find a container's member of the cluster: its cards, its host, and its KV peers."""

from collections.abc import Sequence
from dataclasses import dataclass

from ranktable_tools.addresses import HostComparer, canonical
from ranktable_tools.devices.kinds import DeviceKind
from ranktable_tools.errors import RanktableError
from ranktable_tools.matching import find_own_entry
from ranktable_tools.table_file import read_global, read_local
from ranktable_tools.tables import GlobalTable, InstanceEntry, LocalTable, Role, TableServer


@dataclass(frozen=True, slots=True)
class MemberTables:
    """The given tables, with the path of the local one for messages."""

    whole: GlobalTable | None
    local: LocalTable | None
    local_path: str = ""

    @property
    def servers(self) -> Sequence[TableServer]:
        """The known server entries of instances."""
        if self.whole is not None:
            return [instance.server for instance in self.whole.instances]
        return [] if self.local is None else [self.local.server]


@dataclass(frozen=True, slots=True)
class ContainerMember:
    """One container's member: its server entry (None without a table) and the cards of its peers on this host."""

    role: Role
    server: TableServer | None
    peer_ids: tuple[str, ...] = ()

    @property
    def device_ids(self) -> tuple[str, ...]:
        """Its cards; the scheduler has none."""
        return () if self.server is None else self.server.device_ids


def read_tables(global_path: str | None, local_path: str | None, *, share_devices: bool = False) -> MemberTables:
    """Read the given tables. Raises RanktableError naming file, place and value."""
    table = read_global(global_path, share_devices=share_devices) if global_path else None
    return MemberTables(table, read_local(local_path) if local_path else None, local_path or "")


def find_member(role: Role, tables: MemberTables, number: int | None = None) -> ContainerMember:
    """Return the member. Raises RanktableError if the tables have another role, or several matching instances."""
    if role == "scheduler":
        return _scheduler(tables)
    if tables.local is not None:
        return _of_local(role, tables, tables.local)
    if tables.whole is None:
        raise RanktableError(f"{role} needs its cards: set --local-table (or RANK_TABLE_FILE_PATH), or --global-table")
    return _of_role(role, tables.whole, number)


def find_table_kind(tables: MemberTables) -> DeviceKind | None:
    """Return `npu` if devices have their own addresses, as only NPUs do; otherwise None, for unknown."""
    own_network = any(
        device.device_ip is not None and canonical(device.device_ip) != canonical(server.server_ip)
        for server in tables.servers
        for device in server.devices
    )
    return "npu" if own_network else None


def _scheduler(tables: MemberTables) -> ContainerMember:
    if tables.local is not None and tables.local.server.devices:
        ids = ",".join(tables.local.server.device_ids)
        raise RanktableError(f"{tables.local_path}: has the devices {ids}; the scheduler's local table has none")
    known = tables.whole.scheduler if tables.whole is not None else None
    return ContainerMember("scheduler", tables.local.server if tables.local is not None else known)


def _of_local(role: Role, tables: MemberTables, local: LocalTable) -> ContainerMember:
    if not local.server.devices:
        raise RanktableError(f"{tables.local_path}: has no device, so it is the scheduler's, but the role is {role}")
    if tables.whole is None:
        return ContainerMember(role, local.server)
    try:
        own = find_own_entry(local, tables.whole)
    except RanktableError as error:
        raise RanktableError(f"{tables.local_path}: {error}") from error
    assert own is not None, "it has devices"
    if own.role != role:
        raise RanktableError(f"{tables.local_path}: is {own} of the global table, but the role is {role}")
    return _member(own, tables.whole)


def _of_role(role: Role, table: GlobalTable, number: int | None) -> ContainerMember:
    instances = [instance for instance in table.instances if instance.role == role]
    if number is not None:
        found = [instance for instance in instances if instance.number == number]
        if not found:
            raise RanktableError(
                f"--instance is {number}, but the last {role} instance of the table has number {len(instances) - 1}"
            )
        return _member(found[0], table)
    hosts = HostComparer()
    here = [instance for instance in instances if hosts.same(instance.server.server_ip, "localhost")] or instances
    if len(here) > 1:
        choices = "; ".join(
            f"{one.number}: {one.server.server_ip} devices {','.join(one.server.device_ids)}" for one in here
        )
        raise RanktableError(
            f"the container may be any of {len(here)} {role} instances: set --instance N or --local-table ({choices})"
        )
    return _member(here[0], table)


def _member(own: InstanceEntry, table: GlobalTable) -> ContainerMember:
    """Return the member with the devices of the other role's instances on its host."""
    hosts = HostComparer()
    peers = [
        device_id
        for other in table.instances
        if other.role != own.role and hosts.same(other.server.server_ip, own.server.server_ip)
        for device_id in other.server.device_ids
    ]
    return ContainerMember(own.role, own.server, tuple(peers))
