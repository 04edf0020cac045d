"""The `modelarts` dialect, version 1.0: the guide's global and local tables, byte-stable.

A global table has the groups 0 (the scheduler), 1 (prefill) and 2 (decode); each server entry of a role is one
instance, of pdserve or, with the key `worker`, of another engine. A local table has one instance, or the scheduler, at
the top level, with group id 0.
"""

from ranktable_tools.dialects.dialect import Dialect, Document, ReadOptions
from ranktable_tools.dialects.entries import Form, read_servers, server_list, text_of
from ranktable_tools.dialects.structure import (
    counts_groups_from_0,
    group_ids,
    groups,
    has_mindie_keys,
    holds_devices,
)
from ranktable_tools.document import Node, ValueFault, shown
from ranktable_tools.errors import RanktableError
from ranktable_tools.fields import completed, exactly
from ranktable_tools.reading import LocatedInstance, LocatedServer, TableReading
from ranktable_tools.tables import GlobalTable, InstanceRole, LocalTable, Table, TableInstance, TablePart, TableServer

_FORM = Form(server_keys=("server_port", "worker", "url"), device_keys=("device_port",))
_GROUPS = "0 (scheduler), 1 (prefill) and 2 (decode)"
_ROLES: dict[str, InstanceRole] = {"1": "prefill", "2": "decode"}


def global_text(table: GlobalTable | TablePart) -> str:
    """Return the file text of a global table; for a TablePart, only the groups that it has."""
    groups = (
        ("0", () if table.scheduler is None else (table.scheduler,)),
        ("1", table.prefill),
        ("2", table.decode),
    )
    listed = [{"group_id": group_id, **server_list(servers, _FORM)} for group_id, servers in groups if servers]
    return text_of({"version": "1.0", "status": "completed", "server_group_list": listed})


def local_text(table: LocalTable) -> str:
    """Return the file text of a local table."""
    return _local_text((table.server,))


def write(table: Table) -> str:
    """Return the file text of a table. Raises RanktableError if the guide's format cannot represent it."""
    if table.kind == "instance":
        return _local_text(table.instances[0].servers if table.instances else table.schedulers)
    if len(table.schedulers) > 1:
        listed = " and ".join(server.server_ip for server in table.schedulers)
        raise RanktableError(f"modelarts tables have one scheduler, but this one has {len(table.schedulers)}: {listed}")
    prefill, decode = (tuple(_only_server(one) for one in table.of_role(role)) for role in _ROLES.values())
    if len(prefill) + len(decode) != len(table.instances):
        raise RanktableError(
            "modelarts tables need the role of each instance, but this one has none; set --num-prefill"
        )
    return global_text(TablePart(table.schedulers[0] if table.schedulers else None, prefill, decode))


def read(root: Node, options: ReadOptions) -> TableReading:
    """Read a global table, complete or not, or a local one; problems are added to the node's list."""
    del options  # the guide's tables are complete
    return read_global(root) if root.has("server_group_list") or not root.has("server_list") else read_local(root)


def read_global(root: Node) -> TableReading:
    """Read a global table, complete or not; problems are added to the node's list."""
    _check_head(root)
    groups = root.elements("server_group_list") or []
    expected = ["0", "1", "2"]
    schedulers: list[LocatedServer] = []
    instances: list[LocatedInstance] = []
    for node in groups:
        group_id, servers = _read_group(node, expected)
        if group_id == "0":
            schedulers += servers
        elif group_id is not None:
            instances += [LocatedInstance(_ROLES[group_id], (located,), located.json_path) for located in servers]
    return TableReading("modelarts", "cluster", tuple(schedulers), tuple(instances))


def read_local(root: Node) -> TableReading:
    """Read a local table; problems are added to the node's list."""
    _check_head(root)
    root.text("group_id", exactly("0", "local-group-id", 'must be "0" in a local table'))
    servers = tuple(read_servers(root, _FORM))
    if any(located.server.devices for located in servers):
        return TableReading("modelarts", "instance", (), (LocatedInstance(None, servers, ""),))
    return TableReading("modelarts", "instance", servers, ())


def check_whole(root: Node) -> None:
    """Record a problem for an incomplete global table, one without the three groups 0, 1 and 2."""
    groups = root.value.get("server_group_list") if isinstance(root.value, dict) else None
    if isinstance(groups, list) and len(groups) != 3:
        ids = group_ids({"server_group_list": groups})
        found = f"has {len(groups)} group{'s' if len(groups) != 1 else ''}"
        advice = (
            f"must have 3: {_GROUPS}; here: {shown(ids)}; complete tables of single hosts with merge, and change "
            "those of other dialects with convert"
        )
        Node(ids, "server_group_list", root.problems).report("group-count", found, advice)


def _matches(document: Document) -> bool:
    if "server_group_list" not in document:
        return "group_id" in document and "server_list" in document
    if has_mindie_keys(document) or (counts_groups_from_0(document) and len(group_ids(document)) > 3):
        return False
    # Integer counts with devices in group 0 are merge-all's; string counts are the guide's format with a mistake.
    strings = all(isinstance(group.get("server_count"), str) for group in groups(document))
    return strings or not holds_devices(document, "0")


def _check_head(root: Node) -> None:
    root.text("version", exactly("1.0", "bad-version", 'must be "1.0"'))
    root.text("status", completed)


def _read_group(node: Node, expected: list[str]) -> tuple[str | None, list[LocatedServer]]:
    """Read one group. `expected` has the ids that may still come, in order; those up to this group's id are removed."""
    group_id = node.text("group_id", lambda text: _check_group_id(text, expected))
    servers = read_servers(node, _FORM)
    if group_id is not None:
        del expected[: expected.index(group_id) + 1]
    return group_id, servers


def _check_group_id(text: str, expected: list[str]) -> ValueFault | None:
    if text in expected:
        return None
    wanted = " or ".join(f'"{group_id}"' for group_id in expected) or "absent: all groups come before it"
    return ValueFault("group-id", f"must be {wanted}; the groups are {_GROUPS}, in this order, each once")


def _only_server(instance: TableInstance) -> TableServer:
    if len(instance.servers) != 1:
        hosts = " and ".join(server.server_ip for server in instance.servers)
        raise RanktableError(
            f"modelarts tables have one server entry per instance, but a {instance.role} instance here has "
            f"{len(instance.servers)}: {hosts}"
        )
    return instance.servers[0]


def _local_text(servers: tuple[TableServer, ...]) -> str:
    head = {"version": "1.0", "status": "completed", "group_id": "0"}
    return text_of({**head, **server_list(servers, _FORM)})


DIALECT = Dialect("modelarts", "the guide's global and local tables", _matches, read, write)
