"""Read and write server and device entries, which all dialects share."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ranktable_tools.document import Check, Node
from ranktable_tools.fields import address, anything, identity, number, port, worker_kind
from ranktable_tools.reading import LocatedServer
from ranktable_tools.tables import TableDevice, TableServer
from ranktable_tools.worker_kind import worker_named
from ranktable_tools.worker_urls import check_url, worker_url

_SERVER_CHECKS: Mapping[str, Check] = {
    "server_port": port,
    "worker": worker_kind,
    "url": check_url,
    "host_ip": address,
    "container_ip": address,
    "pod_name": anything,
}
_DEVICE_CHECKS: Mapping[str, Check] = {
    "device_port": port,
    "super_device_id": number,
    "device_logical_id": number,
    "backup_device_ip": address,
    "backup_device_port": port,
    "host_port": port,
}


@dataclass(frozen=True, slots=True)
class Form:
    """The entry format of a dialect: required keys, optional keys that are read, and how ids are checked."""

    server_ip: bool = True
    device_ip: bool = True
    server_keys: tuple[str, ...] = ()
    device_keys: tuple[str, ...] = ()
    server_id: Check = identity
    device_id: Check = number
    super_device_id: Check = number


def read_servers(node: Node, form: Form) -> list[LocatedServer]:
    """Read `server_count` and `server_list`; problems are added to the node's list."""
    elements = node.elements("server_list")
    if elements is None:
        return []
    count = node.child("server_count", f'write "{len(elements)}"')
    # The guide writes strings; its later merge modes write integers.
    if count is not None and (isinstance(count.value, bool) or str(count.value) != str(len(elements))):
        count.refuse("server-count", f'must be "{len(elements)}", the number of servers in server_list')
    if not elements:
        Node([], f"{node.json_path}.server_list".lstrip("."), node.problems).refuse(
            "empty-list", "must contain a server"
        )
    parsed = [_read_server(element, form) for element in elements]
    return [located for located in parsed if located is not None]


def read_device(node: Node, form: Form, rank_id: str | None = None) -> TableDevice | None:
    """Read one device entry; its rank is `rank_id` if the dialect has no ranks."""
    device_id = node.text("device_id", form.device_id)
    wants_ip = form.device_ip or node.has("device_ip")
    device_ip = node.text("device_ip", address) if wants_ip else None
    rank = node.text("rank_id", number) if rank_id is None else rank_id
    checks = {**_DEVICE_CHECKS, "super_device_id": form.super_device_id}
    extras = {key: node.optional_text(key, checks[key]) for key in form.device_keys}
    if device_id is None or rank is None or (wants_ip and device_ip is None):
        return None
    return TableDevice(device_id, device_ip, rank, **extras)


def server_list(servers: Iterable[TableServer], form: Form) -> dict[str, object]:
    """Return `server_count` and `server_list` in the dialect's format."""
    listed = [_server_object(server, form) for server in servers]
    return {"server_count": str(len(listed)), "server_list": listed}


def text_of(document: Mapping[str, object]) -> str:
    """Return a document as a file's text: indented by 4, byte-identical for equal tables."""
    return json.dumps(document, indent=4) + "\n"


def _read_server(node: Node, form: Form) -> LocatedServer | None:
    server_id = node.text("server_id", form.server_id)
    server_ip = node.text("server_ip", address) if form.server_ip else None
    extras = {key: node.optional_text(key, _SERVER_CHECKS[key]) for key in form.server_keys}
    devices = _read_devices(node, form) if node.has("device") else ()
    if server_id is None or devices is None or (form.server_ip and server_ip is None):
        return None
    host_ip, container_ip = extras.get("host_ip"), extras.get("container_ip")
    server_port, url = extras.get("server_port"), extras.get("url")
    server = TableServer(
        server_id=server_id,
        # Without a server_ip, a pod is reached at its own address or its host's; a server_id usually is an address too.
        server_ip=server_ip or container_ip or host_ip or server_id,
        devices=devices,
        server_port=None if server_port is None else int(server_port),
        worker=worker_named(extras.get("worker")),
        url=None if url is None else worker_url(url),
        host_ip=host_ip,
        container_ip=container_ip,
        pod_name=extras.get("pod_name"),
    )
    return LocatedServer(server, node.json_path)


def _read_devices(node: Node, form: Form) -> tuple[TableDevice, ...] | None:
    elements = node.elements("device")
    if elements is None:
        return None
    if not elements:
        Node([], f"{node.json_path}.device", node.problems).refuse("empty-list", "must contain a device, or be absent")
        return None
    parsed = [read_device(element, form) for element in elements]
    devices = tuple(device for device in parsed if device is not None)
    return devices if len(devices) == len(elements) else None


def _server_object(server: TableServer, form: Form) -> dict[str, object]:
    entry: dict[str, object] = {"server_id": server.server_id}
    if form.server_ip:
        entry["server_ip"] = server.server_ip
    entry |= _set_keys(server, form.server_keys)
    if server.devices:
        entry["device"] = [_device_object(device, form) for device in server.devices]
    return entry


def _device_object(device: TableDevice, form: Form) -> dict[str, str]:
    entry = {"device_id": device.device_id, **_set_keys(device, ("device_ip",)), "rank_id": device.rank_id}
    return entry | _set_keys(device, form.device_keys)


def _set_keys(entry: TableServer | TableDevice, keys: Iterable[str]) -> dict[str, str]:
    found = {key: getattr(entry, key) for key in keys}
    return {key: str(value) for key, value in found.items() if value is not None}
