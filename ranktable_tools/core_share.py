"""Divide a host's cores among the devices of its CPU instances. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ranktable_tools.addresses import canonical
from ranktable_tools.tables import GlobalTable, TableServer


@dataclass(frozen=True, slots=True)
class CoreShare:
    """The cores of one instance; `shared` if the host has more device ids than cores.

    `of_host` is the instance's fraction of the host's device ids, and so its fraction of a CPU quota for all instances.
    """

    cores: tuple[int, ...]
    shared: bool
    of_host: float = 1.0


def core_share(table: GlobalTable, own: TableServer, own_addresses: Collection[str], cores: Sequence[int]) -> CoreShare:
    """Return the cores of `own`: `cores` divided evenly, in table order, among all device ids of this host.

    `own_addresses` are all names and addresses of this host (`addresses.own_hosts()`). With fewer cores than ids,
    neighbouring ids share one core. Raises ValueError if there are no cores or `own` is not in the table.
    """
    here = [instance.server for instance in table.instances if _is_here(instance.server, own, own_addresses)]
    ids = list(dict.fromkeys(device_id for server in here for device_id in server.device_ids))
    if not cores or not set(own.device_ids) <= set(ids):
        raise ValueError(f"cannot assign {len(cores)} cores to devices {own.device_ids} among {ids}")
    assigned: set[int] = set()
    for device_id in own.device_ids:
        assigned.update(_share_of_cores(ids.index(device_id), len(ids), cores))
    own_cores = tuple(core for core in cores if core in assigned)
    return CoreShare(own_cores, shared=len(ids) > len(cores), of_host=len(own.device_ids) / len(ids))


def _share_of_cores(position: int, num_ids: int, cores: Sequence[int]) -> Sequence[int]:
    start = position * len(cores) // num_ids
    end = (position + 1) * len(cores) // num_ids
    return cores[start : max(end, start + 1)]


def _is_here(server: TableServer, own: TableServer, own_addresses: Collection[str]) -> bool:
    mine, theirs = canonical(own.server_ip), canonical(server.server_ip)
    return mine == theirs or (mine in own_addresses and theirs in own_addresses)
