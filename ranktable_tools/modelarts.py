"""The `modelarts` dialect, version 1.0: its JSON to plain tables and back, byte-stable."""

import json
import re
from dataclasses import dataclass

from ranktable_tools.addresses import host_problem
from ranktable_tools.document import Node, shown
from ranktable_tools.ports import parse_port
from ranktable_tools.tables import Device, GlobalTable, LocalTable, Server, TablePart

_GROUPS = "0 (scheduler), 1 (prefill) and 2 (decode)"
_WHOLE_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class PlacedServer:
    """A server entry and its JSON place."""

    server: Server
    place: str


@dataclass(frozen=True, slots=True)
class PlacedGroup:
    """One group of a global table: its id and its servers."""

    group_id: str
    servers: tuple[PlacedServer, ...]


def global_text(table: GlobalTable | TablePart) -> str:
    """Return the file text of a global table; a part holds only the groups it has."""
    groups = (
        ("0", () if table.scheduler is None else (table.scheduler,)),
        ("1", table.prefill),
        ("2", table.decode),
    )
    listed = [{"group_id": group_id, **_server_list(servers)} for group_id, servers in groups if servers]
    return _text({"version": "1.0", "status": "completed", "server_group_list": listed})


def local_text(table: LocalTable) -> str:
    """Return the file text of a local table."""
    return _text({"version": "1.0", "status": "completed", "group_id": "0", **_server_list((table.server,))})


def parse_groups(root: Node) -> tuple[PlacedGroup, ...]:
    """Read the groups of a global table, whole or not; what is wrong goes to the node's problems."""
    _check_head(root)
    groups = root.elements("server_group_list") or []
    expected = ["0", "1", "2"]
    parsed: list[PlacedGroup] = []
    for node in groups:
        group = _parse_group(node, expected)
        if group is not None:
            parsed.append(group)
    return tuple(parsed)


def check_group_count(root: Node) -> None:
    """Refuse a table that is not whole: it has the groups 0, 1 and 2."""
    groups = root.value.get("server_group_list") if isinstance(root.value, dict) else None
    if isinstance(groups, list) and len(groups) != 3:
        ids = [group.get("group_id") if isinstance(group, dict) else group for group in groups]
        root.at("the number of groups in server_group_list", len(groups)).refuse(
            f"must be 3: {_GROUPS}; here: {shown(ids)}; tables of single hosts are made whole by merge"
        )


def parse_local(root: Node) -> PlacedServer | None:
    """Read a local table; what is wrong goes to the node's problems."""
    _check_head(root)
    root.text("group_id", lambda text: None if text == "0" else 'must be "0" in a local table')
    servers = _parse_servers(root)
    if len(servers) > 1:
        root.at("the number of servers in server_list", len(servers)).refuse("must be 1 in a local table")
    return servers[0] if len(servers) == 1 else None


def _check_head(root: Node) -> None:
    root.text("version", lambda text: None if text == "1.0" else 'must be "1.0"')
    root.text("status", lambda text: None if text == "completed" else 'must be "completed"')


def _parse_group(node: Node, expected: list[str]) -> PlacedGroup | None:
    """Read one group; `expected` are the ids that may still come, in order, and loses those that came."""
    wanted = " or ".join(f'"{group_id}"' for group_id in expected) or "absent: all groups stand before it"
    advice = f"must be {wanted}; the groups are {_GROUPS}, in this order, each once"
    group_id = node.text("group_id", lambda text: None if text in expected else advice)
    servers = _parse_servers(node)
    if group_id is None:
        return None
    del expected[: expected.index(group_id) + 1]
    for placed in servers:
        _check_devices_fit(node, placed, is_scheduler=group_id == "0")
    if group_id == "0" and len(servers) > 1:
        node.at(f"the number of schedulers in {node.place}", len(servers)).refuse("must be 1")
    return PlacedGroup(group_id, tuple(servers))


def _check_devices_fit(group: Node, placed: PlacedServer, *, is_scheduler: bool) -> None:
    if is_scheduler and placed.server.devices:
        devices = group.at(f"{placed.place}.device", placed.server.device_ids)
        devices.refuse("must be absent: the scheduler has no device")
    if not is_scheduler and not placed.server.devices:
        group.at(placed.place, {}).child("device", "list the devices of this instance")


def _parse_servers(node: Node) -> list[PlacedServer]:
    elements = node.elements("server_list")
    if elements is None:
        return []
    count = node.child("server_count", f'write "{len(elements)}"')
    # The guide writes strings; its later merge modes write integers.
    if count is not None and (isinstance(count.value, bool) or str(count.value) != str(len(elements))):
        count.refuse(f'must be "{len(elements)}", the number of servers in server_list')
    if not elements:
        node.at(f"{node.place}.server_list" if node.place else "server_list", []).refuse("must hold a server")
    parsed = [_parse_server(element) for element in elements]
    return [placed for placed in parsed if placed is not None]


def _parse_server(node: Node) -> PlacedServer | None:
    server_id = node.text("server_id", _id_advice)
    server_ip = node.text("server_ip", host_problem)
    port = node.text("server_port", _port_advice) if node.has("server_port") else None
    devices = _parse_devices(node) if node.has("device") else ()
    if server_id is None or server_ip is None or devices is None:
        return None
    return PlacedServer(Server(server_id, server_ip, devices, None if port is None else int(port)), node.place)


def _parse_devices(node: Node) -> tuple[Device, ...] | None:
    elements = node.elements("device")
    if elements is None:
        return None
    if not elements:
        node.at(f"{node.place}.device", []).refuse("must hold a device, or be absent")
        return None
    parsed = [_parse_device(element) for element in elements]
    devices = tuple(device for device in parsed if device is not None)
    if len(devices) < len(elements):
        return None
    _check_ranks(node, devices)
    return devices


def _parse_device(node: Node) -> Device | None:
    device_id = node.text("device_id", _number_advice)
    device_ip = node.text("device_ip", host_problem)
    rank_id = node.text("rank_id", _number_advice)
    if device_id is None or device_ip is None or rank_id is None:
        return None
    return Device(device_id, device_ip, rank_id)


def _check_ranks(node: Node, devices: tuple[Device, ...]) -> None:
    ranks = [device.rank_id for device in devices]
    wanted = [str(rank) for rank in range(len(devices))]
    if sorted(ranks, key=int) != wanted:
        node.at(f"the rank_id list of {node.place}.device", ranks).refuse(
            f"must be {json.dumps(wanted)}: from 0, without a gap, each once"
        )


def _id_advice(text: str) -> str | None:
    if "*" in text:
        return host_problem(text)
    return None if text.strip() else "must not be empty"


def _number_advice(text: str) -> str | None:
    return None if _WHOLE_NUMBER.fullmatch(text) else 'must be a whole number as a string, like "4"'


def _port_advice(text: str) -> str | None:
    return 'must be a port from "1" to "65535"' if parse_port(text) is None else None


def _server_list(servers: tuple[Server, ...]) -> dict[str, object]:
    return {"server_count": str(len(servers)), "server_list": [_server_object(server) for server in servers]}


def _server_object(server: Server) -> dict[str, object]:
    entry: dict[str, object] = {"server_id": server.server_id, "server_ip": server.server_ip}
    if server.server_port is not None:
        entry["server_port"] = str(server.server_port)
    if server.devices:
        entry["device"] = [
            {"device_id": device.device_id, "device_ip": device.device_ip, "rank_id": device.rank_id}
            for device in server.devices
        ]
    return entry


def _text(document: dict[str, object]) -> str:
    return json.dumps(document, indent=4) + "\n"
