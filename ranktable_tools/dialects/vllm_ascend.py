"""The `vllm-ascend` dialect: prefill_device_list and decode_device_list, devices without instances. Only read.

An instance is `devices_per_instance` devices of a list, or by default all devices of one role and server.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from ranktable_tools.dialects.dialect import Dialect, Document, ReadOptions
from ranktable_tools.dialects.entries import Form, read_device
from ranktable_tools.document import Node, ValueFault, shown
from ranktable_tools.fields import address, completed, identity, number
from ranktable_tools.reading import LocatedInstance, LocatedServer, TableReading
from ranktable_tools.tables import InstanceRole, TableDevice, TableServer

_FORM = Form(device_keys=("super_device_id",))
_ROLES: tuple[InstanceRole, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class _Entry:
    """One device with its server."""

    server_id: str
    super_pod_id: str | None
    device: TableDevice
    json_path: str


def _read(root: Node, options: ReadOptions) -> TableReading:
    root.text("version", lambda text: None if text in ("1.0", "1.2") else ValueFault("bad-version", 'must be "1.2"'))
    root.text("status", completed)
    instances: list[LocatedInstance] = []
    cluster_ids: dict[str, str] = {}
    for role in _ROLES:
        entries = _read_entries(root, f"{role}_device_list", cluster_ids)
        for chunk in _cut(root, f"{role}_device_list", entries, options.devices_per_instance):
            instances.append(_instance(role, chunk))
    _check_server_count(root, instances)
    return TableReading("vllm-ascend", "cluster", (), tuple(instances), _split_notes(options, instances))


def _read_entries(root: Node, key: str, cluster_ids: dict[str, str]) -> list[_Entry]:
    nodes = root.elements(key)
    if nodes is not None and not nodes:
        Node([], key, root.problems).refuse("empty-list", "must contain a device")
    entries = []
    for node in nodes or []:
        server_id = node.text("server_id", address)
        super_pod_id = node.optional_text("super_pod_id", identity)
        _check_cluster_id(node, cluster_ids)
        device = read_device(node, _FORM, rank_id="0")
        if server_id is not None and device is not None:
            entries.append(_Entry(server_id, super_pod_id, device, node.json_path))
    return entries


def _check_cluster_id(node: Node, place_by_id: dict[str, str]) -> None:
    """Record a problem for a duplicate cluster_id: the cluster_ids identify the two ends of a link."""
    cluster_id = node.optional_text("cluster_id", number)
    if cluster_id is None:
        return
    here = f"{node.json_path}.cluster_id"
    first = place_by_id.setdefault(cluster_id, here)
    if first != here:
        found, advice = f"is {shown(cluster_id)}, as {first} is", "give each device its own, counted from 1"
        Node(cluster_id, here, node.problems).report("cluster-id-twice", found, advice)


def _cut(root: Node, key: str, entries: Sequence[_Entry], size: int | None) -> list[list[_Entry]]:
    if size is None:
        return [list(members) for _, members in groupby(entries, key=lambda entry: entry.server_id)]
    if len(entries) % size and not root.problems:
        found = f"has {len(entries)} device{'s' if len(entries) > 1 else ''}"
        advice = f"the number must be a multiple of --devices-per-instance {size}"
        Node(len(entries), key, root.problems).report("devices-per-instance", found, advice)
    return [list(entries[start : start + size]) for start in range(0, len(entries), size)]


def _instance(role: InstanceRole, entries: Sequence[_Entry]) -> LocatedInstance:
    ranked = [replace(entry, device=replace(entry.device, rank_id=str(rank))) for rank, entry in enumerate(entries)]
    servers = []
    for server_id, members in groupby(ranked, key=lambda entry: entry.server_id):
        found = list(members)
        devices = tuple(entry.device for entry in found)
        server = TableServer(server_id, server_id, devices, super_pod_id=found[0].super_pod_id)
        servers.append(LocatedServer(server, found[0].json_path, tuple(entry.json_path for entry in found)))
    return LocatedInstance(role, tuple(servers), entries[0].json_path)


def _check_server_count(root: Node, instances: Sequence[LocatedInstance]) -> None:
    count = root.child("server_count", "write the number of servers") if not root.problems else None
    servers = {located.server.server_id for instance in instances for located in instance.servers}
    if count is not None and (isinstance(count.value, bool) or str(count.value) != str(len(servers))):
        count.refuse("server-count", f'must be "{len(servers)}", the number of servers named in the lists')


def _split_notes(options: ReadOptions, instances: Sequence[LocatedInstance]) -> tuple[str, ...]:
    if options.devices_per_instance is not None or not instances:
        return ()
    return (
        "the table has devices, not instances: the devices of one role and server become one instance "
        "(--devices-per-instance changes that)",
    )


def _matches(document: Document) -> bool:
    return any(f"{role}_device_list" in document for role in _ROLES)


DIALECT = Dialect("vllm-ascend", "vllm-ascend's prefill_device_list and decode_device_list", _matches, _read)
