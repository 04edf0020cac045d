"""The `mindie` dialect, versions 1.0 and 1.2: ClusterD's tables for MindIE, including super pods. Read, never written.

Group 0 has the coordinators, group 1 the controller, each group from 2 on the servers of one job. The servers of a job
are one instance if their ranks are numbered consecutively across servers, else one instance each. MindIE chooses the
prefill instances at run time, so here `num_prefill` specifies them.
"""

from collections.abc import Sequence

from ranktable_tools.dialects.dialect import Dialect, Document, ReadOptions
from ranktable_tools.dialects.entries import Form, read_servers
from ranktable_tools.dialects.hccl import MAX_SUPER_DEVICE_ID
from ranktable_tools.dialects.kubeinfer import check_num_prefill, role_of
from ranktable_tools.dialects.structure import groups, has_mindie_keys, holds_devices, servers
from ranktable_tools.dialects.super_pods import read_super_pods
from ranktable_tools.document import MAX_ELEMENTS, Node, ValueFault
from ranktable_tools.fields import PORT_ADVICE, completed, number_up_to
from ranktable_tools.ports import parse_port
from ranktable_tools.reading import LocatedInstance, LocatedServer, TableReading

MAX_GROUPS = 98
MAX_COORDINATORS = 2
_MAX_DEVICE_ID = 2048
_PORTS = ("predict_port", "mgmt_port", "metric_port", "inter_comm_port")
_FORM = Form(
    server_keys=("pod_name", "host_ip", "container_ip"),
    device_keys=("device_logical_id", "super_device_id"),
    device_id=number_up_to(_MAX_DEVICE_ID),
    super_device_id=number_up_to(MAX_SUPER_DEVICE_ID),
)


def _read(root: Node, options: ReadOptions) -> TableReading:
    root.text(
        "version", lambda text: None if text in ("1.0", "1.2") else ValueFault("bad-version", 'must be "1.0" or "1.2"')
    )
    root.text("status", completed)
    schedulers: list[LocatedServer] = []
    instances: list[list[LocatedServer]] = []
    notes: list[str] = []
    for number, node in enumerate(_groups(root)):
        group_id = node.text("group_id", number_up_to(MAX_GROUPS - 1))
        located = read_servers(node, _FORM)
        _check_ports(node)
        if group_id == "0":
            schedulers += located
        elif group_id == "1":
            _refuse_devices(node, located)
            notes += [f"{entry.json_path}: the controller {entry.server.server_ip} is ignored" for entry in located]
        elif group_id is not None:
            instances += _instances(node, located)
        _check_first_groups(node, number, group_id)
    check_num_prefill(root, options, len(instances))
    return TableReading("mindie", "cluster", tuple(schedulers), _make_instances(instances, options), tuple(notes))


def _groups(root: Node) -> list[Node]:
    elements = root.elements("server_group_list") or []
    if len(elements) > MAX_GROUPS:
        found, advice = f"has {len(elements)} groups", f"must have at most {MAX_GROUPS}"
        Node(len(elements), "server_group_list", root.problems).report("too-many", found, advice)
    return elements


def _make_instances(instances: Sequence[list[LocatedServer]], options: ReadOptions) -> tuple[LocatedInstance, ...]:
    return tuple(
        LocatedInstance(role_of(number, options.num_prefill), tuple(servers), servers[0].json_path)
        for number, servers in enumerate(instances)
    )


def _instances(node: Node, servers: list[LocatedServer]) -> list[list[LocatedServer]]:
    located = read_super_pods(node, servers) if node.has("super_pod_list") else servers
    ranks = [[device.rank_id for device in server.server.devices] for server in located]
    if all(sorted(of_server, key=int) == [str(rank) for rank in range(len(of_server))] for of_server in ranks):
        return [[server] for server in located]
    return [located]


def _refuse_devices(node: Node, controllers: Sequence[LocatedServer]) -> None:
    """Reject a controller with devices: such a table is another dialect's, and its instances would be lost."""
    for entry in controllers:
        ids = entry.server.device_ids
        if ids:
            advice = "must be absent: the controller has no device (is this table MindIE's?)"
            Node(ids, f"{entry.json_path}.device", node.problems).refuse("scheduler-device", advice)


def _check_ports(node: Node) -> None:
    """Check the ports that MindIE's servers may have; they are not kept, since pdserve does not use them."""
    listed = node.value.get("server_list") if isinstance(node.value, dict) else None
    for number, server in enumerate(listed[:MAX_ELEMENTS] if isinstance(listed, list) else ()):
        for key in _PORTS if isinstance(server, dict) else ():
            value = server.get(key, "1")
            if isinstance(value, bool) or parse_port(str(value)) is None:
                json_path = f"{node.json_path}.server_list[{number}].{key}"
                Node(value, json_path, node.problems).refuse("bad-port", PORT_ADVICE)


def _check_first_groups(node: Node, number: int, group_id: str | None) -> None:
    wanted = str(number)
    if number < 2 and group_id not in (None, wanted):
        found = Node(group_id, f"{node.json_path}.group_id", node.problems)
        found.refuse("group-id", f'must be "{wanted}": the groups start with 0 (coordinators) and 1 (controller)')


def _matches(document: Document) -> bool:
    if "server_group_list" not in document:
        return False
    # Without those keys it is still MindIE's if the first two groups, coordinator and controller, have no devices.
    by_id = {str(group.get("group_id")): group for group in groups(document)}
    bare = {"0", "1"} < set(by_id) and all(_only_addresses(by_id[group_id]) for group_id in ("0", "1"))
    later = any(holds_devices(document, group_id) for group_id in set(by_id) - {"0", "1"})
    return has_mindie_keys(document) or (bare and later)


def _only_addresses(group: Document) -> bool:
    return bool(servers(group)) and not any("device" in server or "worker" in server for server in servers(group))


DIALECT = Dialect("mindie", "MindIE and ClusterD, including super pods", _matches, _read, aliases=("clusterd",))
