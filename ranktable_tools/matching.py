"""Find a local table's entry in the global table by exact equality, or report what differs."""

from collections.abc import Iterator
from dataclasses import dataclass

from ranktable_tools.addresses import HostComparer, same_host
from ranktable_tools.document import shown
from ranktable_tools.errors import RanktableError
from ranktable_tools.tables import GlobalTable, InstanceEntry, LocalTable, TableServer


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """One field whose values differ between the local table and an entry."""

    json_path: str
    local: object
    entry: object

    def __str__(self) -> str:
        return f"{self.json_path} is {shown(self.local)} here and {shown(self.entry)} there"


def find_own_entry(local: LocalTable, table: GlobalTable) -> InstanceEntry | None:
    """Return the instance that the local table describes, None for the scheduler.

    Raises RanktableError naming the nearest entry, the differing field and both values.
    """
    if not local.server.devices:
        _require_scheduler(local.server, table.scheduler)
        return None
    hosts = HostComparer()
    found = [(list(differences(local.server, instance.server, hosts)), instance) for instance in table.instances]
    gaps, nearest = min(found, key=lambda pair: _distance(local.server, pair[1].server, pair[0]))
    if gaps:
        raise RanktableError(
            f"is not in the global table; the nearest entry is {nearest} ({nearest.json_path}): {gaps[0]}"
        )
    return nearest


def differences(local: TableServer, entry: TableServer, hosts: HostComparer) -> Iterator[FieldDifference]:
    """Yield the differences in host (resolved), device ids, device addresses and ranks."""
    if not hosts.same(local.server_ip, entry.server_ip):
        yield FieldDifference("server_list[0].server_ip", local.server_ip, entry.server_ip)
    if local.device_ids != entry.device_ids:
        yield FieldDifference("the device_id list", local.device_ids, entry.device_ids)
        return
    for position, (mine, theirs) in enumerate(zip(local.devices, entry.devices, strict=True)):
        json_path = f"server_list[0].device[{position}]"
        if mine.device_ip != theirs.device_ip:
            yield FieldDifference(f"{json_path}.device_ip", mine.device_ip, theirs.device_ip)
        if mine.rank_id != theirs.rank_id:
            yield FieldDifference(f"{json_path}.rank_id", mine.rank_id, theirs.rank_id)


def _require_scheduler(local: TableServer, scheduler: TableServer) -> None:
    if not same_host(local.server_ip, scheduler.server_ip):
        difference = FieldDifference("server_list[0].server_ip", local.server_ip, scheduler.server_ip)
        raise RanktableError(
            "has no device, so it is the scheduler's, but the global table's scheduler "
            f"(server_group_list[0].server_list[0]) differs: {difference}"
        )


def _distance(local: TableServer, entry: TableServer, gaps: list[FieldDifference]) -> tuple[int, bool, int, bool]:
    """Order entries by fewest devices not shared, then by host, then by number of differing fields, then by port.

    The port is compared only to distinguish two instances that share all their devices.
    """
    num_unshared = len(set(local.device_ids) ^ set(entry.device_ids))
    other_host = any(gap.json_path.endswith("server_ip") for gap in gaps)
    return num_unshared, other_host, len(gaps), local.server_port != entry.server_port
