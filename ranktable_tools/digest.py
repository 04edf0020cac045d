"""Identify a global table by a digest: processes compare digests to check that they have the same table."""

import hashlib
import json

from ranktable_tools.addresses import canonical
from ranktable_tools.tables import GlobalTable, TableDevice, TableServer


def table_digest(table: GlobalTable) -> str:
    """Return 16 hex digits of sha256 over the table's members; ports, server ids and formatting are not included.

    A worker's `url` is included: an entry with another URL is another engine.
    """
    form = [
        _server_form(table.scheduler),
        [_server_form(server) for server in table.prefill],
        [_server_form(s) for s in table.decode],
    ]
    return hashlib.sha256(json.dumps(form, separators=(",", ":")).encode()).hexdigest()[:16]


def entry_form(server: TableServer) -> str:
    """Return the part of one entry that the table's digest covers; entries with equal forms are the same member."""
    return json.dumps(_server_form(server), separators=(",", ":"))


def _server_form(server: TableServer) -> list[object]:
    devices = [[device.device_id, _address(device), device.rank_id] for device in server.devices]
    member: list[object] = [canonical(server.server_ip), devices]
    return member if server.worker is None else [*member, server.worker, server.url]


def _address(device: TableDevice) -> str | None:
    return None if device.device_ip is None else canonical(device.device_ip)
