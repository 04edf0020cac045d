"""Join local tables into one instance over several servers, for tools that support such instances. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ranktable_tools.addresses import HostComparer
from ranktable_tools.errors import RanktableError
from ranktable_tools.reading import LocatedInstance, LocatedServer, TableReading
from ranktable_tools.rules.catalogue import errors
from ranktable_tools.tables import Table, TableDevice, TableInstance, TableServer


@dataclass(frozen=True, slots=True)
class NamedInstance:
    """One local table's instance and the file it came from."""

    path: str
    instance: TableInstance


def instance_of(path: str, table: Table) -> TableInstance:
    """Return the instance of a local table. Raises RanktableError for a global one and for the scheduler's."""
    if table.kind == "cluster":
        raise RanktableError(f"{path}: is a global table; merge-local joins local ones (merge joins global ones)")
    if not table.instances:
        raise RanktableError(f"{path}: is the scheduler's local table, which has no devices to merge")
    return table.instances[0]


def merge_local(parts: Sequence[NamedInstance]) -> Table:
    """Return one instance with all servers in argument order, and ranks numbered across all of them.

    The devices of one host are joined into one server entry: HCCL requires unique servers. Raises RanktableError naming
    the conflicting files.
    """
    servers: list[LocatedServer] = []
    for named in parts:
        for number, server in enumerate(named.instance.servers):
            servers.append(LocatedServer(server, f"{named.path}: server_list[{number}]"))
    ranked = _with_ranks(servers)
    problems = errors(TableReading("modelarts", "instance", (), (LocatedInstance(None, ranked, parts[0].path),)))
    if problems:
        raise RanktableError(str(problems[0]))
    return Table("instance", (), (TableInstance(None, tuple(_join_by_host([located.server for located in ranked]))),))


def _with_ranks(servers: Sequence[LocatedServer]) -> tuple[LocatedServer, ...]:
    ranked, start = [], 0
    for located in servers:
        devices = tuple(
            replace(device, rank_id=str(start + position)) for position, device in enumerate(_by_rank(located.server))
        )
        ranked.append(replace(located, server=replace(located.server, devices=devices, server_port=None)))
        start += len(devices)
    return tuple(ranked)


def _by_rank(server: TableServer) -> list[TableDevice]:
    return sorted(server.devices, key=lambda device: int(device.rank_id))


def _join_by_host(servers: Sequence[TableServer]) -> list[TableServer]:
    hosts = HostComparer()
    joined: list[TableServer] = []
    for server in servers:
        at = next((i for i, known in enumerate(joined) if hosts.same(known.server_ip, server.server_ip)), None)
        if at is None:
            joined.append(server)
        else:
            joined[at] = replace(joined[at], devices=(*joined[at].devices, *server.devices))
    return joined
