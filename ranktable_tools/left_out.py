"""Count the keys of a document that no reader of ours reads."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields

from ranktable_tools.tables import Device, Server

_READ = frozenset(
    {
        *(field.name for field in (*fields(Server), *fields(Device))),
        *("version", "status", "server_count", "server_list", "server_group_list", "group_id", "device"),
        *("super_pod_list", "prefill_device_list", "decode_device_list", "cluster_id", "deploy_server"),
    }
)


def unread_keys(document: object) -> list[str]:
    """Return a note for each key that is not read, with how often it stands there."""
    counts = Counter(key for key in _keys(document) if key not in _READ)
    return [f"{key} ({count}x) is left out: it is not read" for key, count in counts.items()]


def _keys(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
        for member in value.values():
            yield from _keys(member)
    elif isinstance(value, list):
        for member in value:
            yield from _keys(member)
