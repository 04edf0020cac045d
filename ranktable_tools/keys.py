"""Find keys of a document that are not read, and those that look misspelt."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from difflib import get_close_matches

from ranktable_tools.document import Problem, shown
from ranktable_tools.tables import TableDevice, TableServer

_READ = frozenset(
    {
        *(field.name for field in (*fields(TableServer), *fields(TableDevice)) if field.name != "devices"),
        *("version", "status", "server_count", "server_list", "server_group_list", "group_id", "device"),
        *("super_pod_list", "prefill_device_list", "decode_device_list", "cluster_id", "deploy_server"),
    }
)
_ALIKE = 0.85
_MAX_SPELLINGS = 1000


def unread_keys(document: object) -> list[str]:
    """Return a note for each key that is not read, with its count."""
    counts = Counter(key for _, key in _keys(document, "") if key not in _READ)
    return [f"{key} ({count}x) is left out: it is not read" for key, count in counts.items()]


def misspelt_keys(document: object) -> Iterator[Problem]:
    """Yield each unread key that resembles a known one; only the first `_MAX_SPELLINGS` different keys are compared."""
    meant: dict[str, list[str]] = {}
    for json_path, key in _keys(document, ""):
        if key in _READ:
            continue
        if key not in meant:
            meant[key] = get_close_matches(key, _READ, n=1, cutoff=_ALIKE) if len(meant) < _MAX_SPELLINGS else []
        if meant[key]:
            yield Problem("misspelt-key", json_path, key, f"is an unknown key {shown(key)}", f"write {meant[key][0]}")


def _keys(value: object, json_path: str) -> Iterator[tuple[str, str]]:
    """Yield the path and name of each key; a document is at most 32 deep."""
    if isinstance(value, dict):
        for key, member in value.items():
            here = f"{json_path}.{key}" if json_path else key
            yield here, key
            yield from _keys(member, here)
    elif isinstance(value, list):
        for index, member in enumerate(value):
            yield from _keys(member, f"{json_path}[{index}]")
