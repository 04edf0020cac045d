"""The guide's example tables, unmasked, and a way to put documents into files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Document = dict[str, Any]
Save = Callable[[str, object], str]


def _server(*devices: tuple[str, str, str]) -> Document:
    listed = [{"device_id": device, "device_ip": address, "rank_id": rank} for device, address, rank in devices]
    server: Document = {"server_id": "localhost", "server_ip": "localhost"}
    return {**server, "device": listed} if listed else server


@pytest.fixture
def guide_global() -> Document:
    """The guide's global table: 1P1D at TP 2."""
    prefill = _server(("4", "10.0.0.22", "0"), ("5", "10.0.0.23", "1"))
    decode = _server(("6", "29.0.0.56", "0"), ("7", "29.0.0.72", "1"))
    servers = [_server(), prefill, decode]
    groups = [{"group_id": str(i), "server_count": "1", "server_list": [s]} for i, s in enumerate(servers)]
    return {"version": "1.0", "status": "completed", "server_group_list": groups}


@pytest.fixture
def guide_local() -> Document:
    """The guide's local table: the decode instance of its global one."""
    server = _server(("6", "29.0.0.56", "0"), ("7", "29.0.0.72", "1"))
    return {"version": "1.0", "status": "completed", "group_id": "0", "server_count": "1", "server_list": [server]}


@pytest.fixture
def guide_host(guide_local: Document) -> Document:
    """A local table of the scheduler."""
    return {**guide_local, "server_list": [_server()]}


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Write a document, or text as it is, to a file of that name and return its path."""

    def write(name: str, document: object) -> str:
        path = tmp_path / name
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return str(path)

    return write
