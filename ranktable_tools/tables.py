"""The tables as plain data: who the scheduler is and which instances there are."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Role = Literal["scheduler", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Device:
    """One device of an instance: physical id, address on the device network, logical rank."""

    device_id: str
    device_ip: str
    rank_id: str


@dataclass(frozen=True, slots=True)
class Server:
    """One server entry: an instance and its devices, or, without devices, the scheduler."""

    server_id: str
    server_ip: str
    devices: tuple[Device, ...] = ()
    server_port: int | None = None

    @property
    def device_ids(self) -> tuple[str, ...]:
        """The physical ids in table order."""
        return tuple(device.device_id for device in self.devices)


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance of a table: `number` counts within its role, `index` over all, prefill first."""

    role: Role
    number: int
    index: int
    server: Server

    @property
    def place(self) -> str:
        """Where the entry stands in a whole table."""
        return f"server_group_list[{1 if self.role == 'prefill' else 2}].server_list[{self.number}]"

    def __str__(self) -> str:
        return f"{self.role} instance {self.number}"


@dataclass(frozen=True, slots=True)
class TablePart:
    """What one host knows: any of the three groups may be missing until the parts are merged."""

    scheduler: Server | None
    prefill: tuple[Server, ...]
    decode: tuple[Server, ...]

    @property
    def instances(self) -> tuple[Instance, ...]:
        """All instances in global order."""
        return tuple(_instances(self.prefill, self.decode))


@dataclass(frozen=True, slots=True)
class GlobalTable:
    """The whole table: one scheduler, at least one prefill and one decode instance."""

    scheduler: Server
    prefill: tuple[Server, ...]
    decode: tuple[Server, ...]

    @property
    def instances(self) -> tuple[Instance, ...]:
        """All instances in global order."""
        return tuple(_instances(self.prefill, self.decode))

    @property
    def part(self) -> TablePart:
        """The same table, typed as one that could be merged."""
        return TablePart(self.scheduler, self.prefill, self.decode)


@dataclass(frozen=True, slots=True)
class LocalTable:
    """What one process is told about itself."""

    server: Server


def whole(part: TablePart) -> GlobalTable | None:
    """Return the part as a whole table, or None while a group is missing."""
    if part.scheduler is None or not part.prefill or not part.decode:
        return None
    return GlobalTable(part.scheduler, part.prefill, part.decode)


def _instances(prefill: tuple[Server, ...], decode: tuple[Server, ...]) -> Iterator[Instance]:
    for number, server in enumerate(prefill):
        yield Instance("prefill", number, number, server)
    for number, server in enumerate(decode):
        yield Instance("decode", number, len(prefill) + number, server)
