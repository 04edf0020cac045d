"""The `kubeinfer` and `omni-merged` dialects 1.0: one group per instance, prefill first, over any number of servers.

kubeinfer (ModelArts on Kubernetes, OMNI) starts with the proxy's group 0; omni-merged (OMNI's merge-all) has none.
Neither contains the number of prefill instances: OMNI's scripts read PREFILL_POD_NUM, pdserve `num_prefill`.
"""

from ranktable_tools.dialects.dialect import Dialect, Document, ReadOptions
from ranktable_tools.dialects.entries import Form, read_servers
from ranktable_tools.dialects.structure import (
    counts_groups_from_0,
    group_ids,
    groups,
    has_mindie_keys,
    holds_devices,
    ranks_continue,
    servers,
)
from ranktable_tools.document import Node
from ranktable_tools.fields import completed, exactly
from ranktable_tools.reading import LocatedInstance, LocatedServer, TableReading
from ranktable_tools.tables import InstanceRole

_FORM = Form(server_keys=("server_port", "pod_name", "host_ip", "container_ip"), device_keys=("device_port",))


def role_of(number: int, num_prefill: int | None) -> InstanceRole | None:
    """Return the role of an instance by its number in the table, or None if `num_prefill` is unknown."""
    if num_prefill is None:
        return None
    return "prefill" if number < num_prefill else "decode"


def check_num_prefill(root: Node, options: ReadOptions, num_instances: int) -> None:
    """Record a problem if `num_prefill` leaves no decode instance."""
    if options.num_prefill is not None and not root.problems and options.num_prefill >= num_instances:
        node = Node(num_instances, root.json_path, root.problems)
        advice = f"--num-prefill is {options.num_prefill}: it must leave a decode instance"
        node.report("num-prefill", f"has {num_instances} instance{'s' if num_instances != 1 else ''}", advice)


def _read_kubeinfer(root: Node, options: ReadOptions) -> TableReading:
    groups_read = _read_groups(root)
    schedulers = groups_read[0][1] if groups_read else []
    instances = _instances(groups_read[1:], options)
    check_num_prefill(root, options, len(instances))
    return TableReading("kubeinfer", "cluster", tuple(schedulers), instances)


def _read_merged(root: Node, options: ReadOptions) -> TableReading:
    instances = _instances(_read_groups(root), options)
    check_num_prefill(root, options, len(instances))
    return TableReading("omni-merged", "cluster", (), instances)


def _read_groups(root: Node) -> list[tuple[str, list[LocatedServer]]]:
    root.text("version", exactly("1.0", "bad-version", 'must be "1.0"'))
    root.text("status", completed)
    read = []
    for number, node in enumerate(root.elements("server_group_list") or []):
        advice = f'must be "{number}": groups count from 0, in order'
        node.text("group_id", exactly(str(number), "group-id", advice))
        read.append((node.json_path, read_servers(node, _FORM)))
    return read


def _instances(groups_read: list[tuple[str, list[LocatedServer]]], options: ReadOptions) -> tuple[LocatedInstance, ...]:
    return tuple(
        LocatedInstance(role_of(number, options.num_prefill), tuple(located), json_path)
        for number, (json_path, located) in enumerate(groups_read)
        if located
    )


def _matches_kubeinfer(document: Document) -> bool:
    if not counts_groups_from_0(document) or has_mindie_keys(document) or holds_devices(document, "0"):
        return False
    if len(group_ids(document)) > 3:
        return True
    spread = [group for group in groups(document) if len(servers(group)) > 1]
    return any(ranks_continue(group) or any("pod_name" in server for server in servers(group)) for group in spread)


def _matches_merged(document: Document) -> bool:
    return counts_groups_from_0(document) and not has_mindie_keys(document) and holds_devices(document, "0")


KUBEINFER = Dialect(
    "kubeinfer", "ModelArts on Kubernetes and OMNI: the proxy, then a group per instance", _matches_kubeinfer,
    _read_kubeinfer, aliases=("omni",),
)  # fmt: skip
OMNI_MERGED = Dialect(
    "omni-merged", "OMNI's merge-all: a group per instance and no proxy", _matches_merged, _read_merged
)
