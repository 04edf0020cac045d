"""The result of reading one table file of any dialect: its entries, each with its JSON path."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ranktable_tools.tables import InstanceRole, Table, TableDevice, TableInstance, TableServer


@dataclass(frozen=True, slots=True)
class PlacedServer:
    """A server entry and its JSON path; `device_places` only if devices are not nested in their server."""

    server: TableServer
    place: str
    device_places: tuple[str, ...] = ()

    @property
    def placed_devices(self) -> Iterator[tuple[str, TableDevice]]:
        """Each device with its path."""
        for position, device in enumerate(self.server.devices):
            yield self.device_places[position] if self.device_places else f"{self.place}.device[{position}]", device


@dataclass(frozen=True, slots=True)
class PlacedInstance:
    """One instance, its servers with their paths, and the path of their container."""

    role: InstanceRole | None
    servers: tuple[PlacedServer, ...]
    place: str

    @property
    def placed_devices(self) -> Iterator[tuple[str, TableDevice]]:
        """Each device with its path, server by server."""
        for placed in self.servers:
            yield from placed.placed_devices


@dataclass(frozen=True, slots=True)
class TableReading:
    """A table with its paths; `notes` describe what the reader assumed or ignored."""

    dialect: str
    kind: Literal["cluster", "instance"]
    schedulers: tuple[PlacedServer, ...]
    instances: tuple[PlacedInstance, ...]
    notes: tuple[str, ...] = ()

    @property
    def table(self) -> Table:
        """The table without its paths."""
        schedulers = tuple(placed.server for placed in self.schedulers)
        instances = tuple(
            TableInstance(instance.role, tuple(placed.server for placed in instance.servers))
            for instance in self.instances
        )
        return Table(self.kind, schedulers, instances)

    @property
    def instance_servers(self) -> Iterator[PlacedServer]:
        """The server entries of all instances."""
        for instance in self.instances:
            yield from instance.servers

    @property
    def servers(self) -> Iterator[PlacedServer]:
        """All server entries, the schedulers' first."""
        yield from self.schedulers
        yield from self.instance_servers
