"""The result of reading one table file of any dialect: its entries, each with its JSON path."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ranktable_tools.tables import GlobalTable, InstanceRole, Table, TableDevice, TableInstance, TableServer


@dataclass(frozen=True, slots=True)
class LocatedServer:
    """A server entry and its JSON path; `device_paths` is set only if devices are not nested in their server."""

    server: TableServer
    json_path: str
    device_paths: tuple[str, ...] = ()

    @property
    def located_devices(self) -> Iterator[tuple[str, TableDevice]]:
        """Each device with its path."""
        for position, device in enumerate(self.server.devices):
            yield self.device_paths[position] if self.device_paths else f"{self.json_path}.device[{position}]", device


@dataclass(frozen=True, slots=True)
class LocatedInstance:
    """One instance, its servers with their paths, and the path of the JSON value that contains the servers."""

    role: InstanceRole | None
    servers: tuple[LocatedServer, ...]
    json_path: str

    @property
    def located_devices(self) -> Iterator[tuple[str, TableDevice]]:
        """Each device with its path, server by server."""
        for located in self.servers:
            yield from located.located_devices


@dataclass(frozen=True, slots=True)
class TableReading:
    """A table with its paths; `notes` describe what the reader assumed or ignored."""

    dialect: str
    kind: Literal["cluster", "instance"]
    schedulers: tuple[LocatedServer, ...]
    instances: tuple[LocatedInstance, ...]
    notes: tuple[str, ...] = ()

    @property
    def table(self) -> Table:
        """The table without its paths."""
        schedulers = tuple(located.server for located in self.schedulers)
        instances = tuple(
            TableInstance(instance.role, tuple(located.server for located in instance.servers))
            for instance in self.instances
        )
        return Table(self.kind, schedulers, instances)

    @property
    def instance_servers(self) -> Iterator[LocatedServer]:
        """The server entries of all instances."""
        for instance in self.instances:
            yield from instance.servers

    @property
    def servers(self) -> Iterator[LocatedServer]:
        """All server entries, the schedulers' first."""
        yield from self.schedulers
        yield from self.instance_servers


def reading_of(table: GlobalTable) -> TableReading:
    """Return a complete table of the guide's dialect with its paths."""
    located = [
        (one.role, LocatedServer(one.server, one.json_path))
        for one in table.instances
        if one.role in ("prefill", "decode")
    ]
    instances = tuple(LocatedInstance(role, (server,), server.json_path) for role, server in located)
    scheduler = LocatedServer(table.scheduler, "server_group_list[0].server_list[0]")
    return TableReading("modelarts", "cluster", (scheduler,), instances)
