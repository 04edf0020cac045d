"""What a dialect writes it reads back equal, detects again by its structure, and writes the same again."""

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ranktable_tools.convert import Conversion, convert
from ranktable_tools.dialects.dialect import ReadOptions
from ranktable_tools.dialects.registry import detect, named
from ranktable_tools.document import Node
from ranktable_tools.json_file import parse_json
from ranktable_tools.rules.catalogue import errors
from ranktable_tools.tables import InstanceRole, Table, TableDevice, TableInstance, TableServer
from tests.examples import examples
from tests.ranktable_tools.documents import Document, group, grouped

HOSTS = [f"192.0.2.{number}" for number in range(1, 9)]
IDS = st.text(min_size=1, max_size=12).filter(lambda text: text.strip() and "*" not in text)
PORTS = st.none() | st.integers(1, 65535)


@st.composite
def _host_devices(draw: st.DrawFn, min_size: int, max_size: int) -> list[tuple[str, list[int]]]:
    """Hosts and device ids, no device twice."""
    size = draw(st.integers(min_size, max_size))
    free = {host: list(range(16)) for host in HOSTS}
    hosts = []
    for _ in range(size):
        host = draw(st.sampled_from([host for host in HOSTS if len(free[host]) >= 4]))
        ids = draw(st.lists(st.sampled_from(free[host]), min_size=1, max_size=4, unique=True))
        free[host] = [device_id for device_id in free[host] if device_id not in ids]
        hosts.append((host, ids))
    return hosts


def _address(host: str, device_id: int) -> str:
    return f"198.51.{int(host[-1])}.{device_id + 1}"


@st.composite
def _servers(draw: st.DrawFn, hosts: list[tuple[str, list[int]]], run_on: bool) -> list[TableServer]:
    """Servers with devices; ranks either continue across them or restart at each."""
    servers: list[TableServer] = []
    start = 0
    for host, ids in hosts:
        order = draw(st.permutations(range(len(ids))))
        devices = tuple(
            TableDevice(
                str(device_id), _address(host, device_id), str(start + rank),
                device_port=draw(PORTS.map(lambda port: None if port is None else str(port))),
            )
            for device_id, rank in zip(ids, order, strict=True)
        )  # fmt: skip
        servers.append(TableServer(draw(IDS), host, devices))
        start += len(ids) if run_on else 0
    return servers


@st.composite
def _clusters(draw: st.DrawFn) -> Table:
    hosts = draw(_host_devices(2, 6))
    split = draw(st.integers(1, len(hosts) - 1))
    servers = draw(_servers(hosts, run_on=False))
    ports = draw(st.lists(st.none() | st.integers(1, 65535), min_size=len(hosts), max_size=len(hosts), unique=True))
    roles: list[InstanceRole] = ["prefill" if number < split else "decode" for number in range(len(hosts))]
    instances = tuple(
        TableInstance(role, (replace(server, server_port=port),))
        for role, server, port in zip(roles, servers, ports, strict=True)
    )
    host = draw(st.sampled_from(HOSTS))
    return Table("cluster", (TableServer(draw(IDS), host),), instances)


@st.composite
def _instances(draw: st.DrawFn, super_pods: bool = False, hccl: bool = False) -> Table:
    hosts = draw(_host_devices(1, 4))
    if hccl:
        hosts = list({host: (host, ids) for host, ids in hosts}.values())
    servers = draw(_servers(hosts, run_on=True))
    if hccl:
        servers = [draw(_of_hccl(server, number)) for number, server in enumerate(servers)]
    if super_pods:
        pods = sorted(draw(st.lists(st.sampled_from("abc"), min_size=len(hosts), max_size=len(hosts))))
        servers = [
            replace(server, super_pod_id=pod, devices=tuple(_of_super_pod(number, server)))
            for number, (server, pod) in enumerate(zip(servers, pods, strict=True))
        ]
    return Table("instance", (), (TableInstance(None, tuple(servers)),))


@st.composite
def _of_hccl(draw: st.DrawFn, server: TableServer, number: int) -> TableServer:
    """A server without its own server_ip: a pod's, a host's, or its id."""
    host_ip = draw(st.none() | st.just(server.server_ip))
    container_ip = draw(st.none() | st.just(f"203.0.113.{number + 1}"))
    server_id = server.server_ip if host_ip is None else f"{number}-{server.server_id}"
    return replace(
        server, server_id=server_id, server_ip=container_ip or host_ip or server_id, host_ip=host_ip,
        container_ip=container_ip,
    )  # fmt: skip


def _of_super_pod(number: int, server: TableServer) -> list[TableDevice]:
    return [
        replace(device, super_device_id=str(1000 * number + position), backup_device_ip=device.device_ip)
        for position, device in enumerate(server.devices)
    ]


def _check(table: Table, name: str) -> None:
    dialect = named(name)
    assert dialect.write is not None
    text = dialect.write(table)
    document = parse_json(text, "t.json")
    root = Node(document, "", [])
    reading = dialect.read(root, ReadOptions())

    assert root.problems == []
    assert reading.table == table
    assert errors(reading) == []
    assert detect(document).name == name
    assert dialect.write(reading.table) == text


@examples(60)
@given(table=_clusters())
def test_the_guides_global_tables(table: Table) -> None:
    _check(table, "modelarts")


@examples(60)
@given(table=_instances())
def test_the_guides_local_tables(table: Table) -> None:
    _check(table, "modelarts")


@examples(60)
@given(table=_instances(hccl=True))
def test_hccl_1_0(table: Table) -> None:
    _check(table, "hccl-1.0")


@examples(60)
@given(table=_instances(hccl=True, super_pods=True))
def test_hccl_1_2(table: Table) -> None:
    _check(table, "hccl-1.2")


@examples(60)
@given(table=_clusters(), merged=st.booleans())
def test_omnis_table_becomes_the_same_cluster(table: Table, merged: bool) -> None:
    """The document is built by hand: a group per instance, prefill first, the proxy before them unless merged."""
    entries = [_entry(instance.servers[0]) for instance in table.instances]
    scheduler = table.schedulers[0]
    if merged:
        document = grouped(*(group(number, entry) for number, entry in enumerate(entries)))
        for listed in document["server_group_list"]:
            listed["server_count"] = 1
    else:
        document = grouped(group(0, _entry(scheduler)), *(group(n + 1, entry) for n, entry in enumerate(entries)))
    dialect = named("omni-merged" if merged else "kubeinfer")
    root = Node(json.loads(json.dumps(document)), "", [])

    reading = dialect.read(root, ReadOptions(num_prefill=len(table.of_role("prefill"))))
    converted = convert(
        reading.table, Conversion(named("modelarts"), api_server=scheduler.server_ip if merged else None)
    )

    assert root.problems == []
    expected = replace(table, schedulers=(TableServer(scheduler.server_ip, scheduler.server_ip),)) if merged else table
    assert converted.table == expected
    assert converted.notes == ()


def _entry(server: TableServer) -> Document:
    entry: Document = {"server_id": server.server_id, "server_ip": server.server_ip}
    if server.server_port is not None:
        entry["server_port"] = str(server.server_port)
    if server.devices:
        entry["device"] = [
            {
                key: value
                for key, value in (
                    ("device_id", device.device_id),
                    ("device_ip", device.device_ip),
                    ("rank_id", device.rank_id),
                    ("device_port", device.device_port),
                )
                if value is not None
            }
            for device in server.devices
        ]
    return entry
