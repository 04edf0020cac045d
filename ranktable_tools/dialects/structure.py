"""Inspect the structure of a document before it is parsed and validated, to detect its dialect."""

from collections.abc import Iterator

from ranktable_tools.dialects.dialect import Document


def groups(document: Document) -> list[Document]:
    """Return the groups that are objects."""
    return _dict_members(document.get("server_group_list"))


def group_ids(document: Document) -> list[object]:
    """Return the group ids as written; a group that is not an object is returned in place of its id."""
    listed = document.get("server_group_list")
    if not isinstance(listed, list):
        return []
    return [group.get("group_id") if isinstance(group, dict) else group for group in listed]


def servers(holder: Document) -> list[Document]:
    """Return the servers of a group, or of a table without groups, that are objects."""
    return _dict_members(holder.get("server_list"))


def devices(holder: Document) -> Iterator[Document]:
    """Yield the devices of a group, or of a table without groups, that are objects."""
    for server in servers(holder):
        yield from _dict_members(server.get("device"))


def holds_devices(document: Document, group_id: str) -> bool:
    """Return whether a group of that id has a device."""
    return any(True for group in groups(document) if group.get("group_id") == group_id for _ in devices(group))


def counts_groups_from_0(document: Document) -> bool:
    """Return whether the group ids are "0", "1" and so on, in order and without a gap."""
    ids = group_ids(document)
    return bool(ids) and ids == [str(number) for number in range(len(ids))]


def has_mindie_keys(document: Document) -> bool:
    """Return whether a group or device has a key that only MindIE's controller and ClusterD write."""
    found = groups(document)
    in_groups = any(key in group for group in found for key in ("deploy_server", "super_pod_list"))
    return in_groups or any("device_logical_id" in device for group in found for device in devices(group))


def ranks_continue(holder: Document) -> bool:
    """Return whether several servers' ranks are, taken together, 0, 1, 2 and so on, each once."""
    ranks = [[device.get("rank_id") for device in _dict_members(server.get("device"))] for server in servers(holder)]
    flat = [rank for of_server in ranks for rank in of_server]
    return len(ranks) > 1 and all(ranks) and sorted(map(str, flat)) == sorted(str(rank) for rank in range(len(flat)))


def _dict_members(value: object) -> list[Document]:
    return [member for member in value if isinstance(member, dict)] if isinstance(value, list) else []
