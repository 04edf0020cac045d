"""HCCL's own tables, versions 1.0 and 1.2 (super pods): the servers and devices of one communicator.

Ranks are numbered across all servers, and each server_id is unique. MindCluster's hccl.json is the same with a few
more keys.
"""

from dataclasses import replace

from ranktable_tools.addresses import canonical
from ranktable_tools.dialects.dialect import Dialect, Document, ReadOptions
from ranktable_tools.dialects.entries import Form, read_servers, server_list, text_of
from ranktable_tools.dialects.structure import devices
from ranktable_tools.dialects.super_pods import read_super_pods, super_pod_list
from ranktable_tools.document import Node
from ranktable_tools.errors import RanktableError
from ranktable_tools.fields import completed, exactly, number_up_to, short_identity
from ranktable_tools.reading import LocatedInstance, TableReading
from ranktable_tools.tables import Table, TableServer

MAX_SUPER_DEVICE_ID = 2**30
_SERVER_KEYS = ("host_ip", "container_ip")
_FORM_1_0 = Form(
    server_ip=False, device_ip=False, server_keys=_SERVER_KEYS, device_keys=("device_port",), server_id=short_identity
)
_FORM_1_2 = replace(
    _FORM_1_0,
    device_keys=("device_port", "super_device_id", "backup_device_ip", "backup_device_port", "host_port"),
    super_device_id=number_up_to(MAX_SUPER_DEVICE_ID),
)


def _read_1_0(root: Node, options: ReadOptions) -> TableReading:
    del options  # one instance, nothing is missing
    return _read_table(root, "1.0", _FORM_1_0)


def _read_1_2(root: Node, options: ReadOptions) -> TableReading:
    del options  # one instance, nothing is missing
    return _read_table(root, "1.2", _FORM_1_2)


def _read_table(root: Node, version: str, form: Form) -> TableReading:
    root.text("version", exactly(version, "bad-version", f'must be "{version}"'))
    root.text("status", completed)
    servers = read_servers(root, form)
    if version == "1.2":
        servers = read_super_pods(root, servers)
    instances = (LocatedInstance(None, tuple(servers), ""),) if servers else ()
    return TableReading(f"hccl-{version}", "instance", (), instances)


def _write_1_0(table: Table) -> str:
    head = {"version": "1.0", "status": "completed"}
    return text_of({**head, **server_list(_hosts(table, "hccl-1.0"), _FORM_1_0)})


def _write_1_2(table: Table) -> str:
    hosts = _by_pod(_hosts(table, "hccl-1.2"))
    for host in hosts:
        missing = next((device for device in host.devices if device.super_device_id is None), None)
        if missing is not None:
            raise RanktableError(
                f"hccl-1.2 tables need the super_device_id of each device, but device {missing.device_id} of "
                f"{host.server_ip} has none here; use --to hccl-1.0"
            )
        if host.super_pod_id is None:
            raise RanktableError(
                f"hccl-1.2 tables need the super pod of each server, but {host.server_ip} has none here"
            )
    head = {"version": "1.2", "status": "completed"}
    return text_of({**head, **server_list(hosts, _FORM_1_2), "super_pod_list": super_pod_list(hosts)})


def _hosts(table: Table, dialect: str) -> list[TableServer]:
    """Return the servers of the table's one instance in HCCL's format: one entry per host, each with a unique id.

    If two hosts share an id, or an id is too long, the addresses become the ids.
    """
    if len(table.instances) != 1:
        remedy = "; choose one with --instance" if table.instances else ""
        raise RanktableError(f"{dialect} tables have one instance, but this one has {len(table.instances)}{remedy}")
    hosts: dict[str, TableServer] = {}
    for server in table.instances[0].servers:
        known = hosts.get(canonical(server.server_ip))
        joined = server if known is None else replace(known, devices=(*known.devices, *server.devices))
        hosts[canonical(server.server_ip)] = joined
    ids = {server.server_id for server in hosts.values()}
    fit = len(ids) == len(hosts) and all(short_identity(server_id) is None for server_id in ids)
    return [_with_host_ip(server if fit else replace(server, server_id=server.server_ip)) for server in hosts.values()]


def _by_pod(hosts: list[TableServer]) -> list[TableServer]:
    """Order servers so that those of one super pod are adjacent, pods by their first server."""
    pods = list(dict.fromkeys(host.super_pod_id for host in hosts))
    return sorted(hosts, key=lambda host: pods.index(host.super_pod_id))


def _with_host_ip(server: TableServer) -> TableServer:
    """Store an address that is not the server_id as host_ip: HCCL has no server_ip."""
    if server.server_ip in (server.server_id, server.host_ip, server.container_ip):
        return server
    return replace(server, host_ip=server.server_ip, container_ip=None)


def _matches_1_0(document: Document) -> bool:
    version = document.get("version")
    return _is_plain(document) and (version == "1.0" or (version != "1.2" and not _has_super_keys(document)))


def _matches_1_2(document: Document) -> bool:
    return _is_plain(document) and (_has_super_keys(document) or document.get("version") == "1.2")


def _is_plain(document: Document) -> bool:
    return "server_list" in document and ("group_id" not in document or _has_super_keys(document))


def _has_super_keys(document: Document) -> bool:
    return "super_pod_list" in document or any("super_device_id" in device for device in devices(document))


HCCL_1_0 = Dialect("hccl-1.0", "HCCL's table of one communicator", _matches_1_0, _read_1_0, _write_1_0)
HCCL_1_2 = Dialect("hccl-1.2", "HCCL's table with super pods (A3)", _matches_1_2, _read_1_2, _write_1_2)
