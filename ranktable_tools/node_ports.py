"""Find the address and port of each instance for the scheduler: from NODE_PORTS if set, else from the table."""

from collections.abc import Sequence
from dataclasses import dataclass

from ranktable_tools.addresses import HostComparer, dial_host
from ranktable_tools.errors import RanktableError
from ranktable_tools.ports import counted_ports, parse_port
from ranktable_tools.tables import GlobalTable, InstanceEntry, Role, TableServer
from ranktable_tools.worker_urls import listed_port, url_place


@dataclass(frozen=True, slots=True)
class InstanceAddress:
    """Where the API of one instance listens: gRPC, or HTTP for a worker of another engine.

    `index` counts over the whole table, prefill first; `name` is like `decode-0`.
    """

    role: Role
    server: TableServer
    host: str
    port: int
    index: int
    name: str


def instance_addresses(
    table: GlobalTable, node_ports: str | None
) -> tuple[tuple[InstanceAddress, ...], tuple[str, ...]]:
    """Return the addresses in the global table's order, and a warning for each instance ignored for lack of a port.

    A worker's `url` overrides both sources. Raises RanktableError naming NODE_PORTS if its value does not fit the
    table, or no instance has a port.
    """
    if node_ports is not None:
        ports: Sequence[int | None] = parse_node_ports(node_ports, table)
    else:
        ports = [listed_port(instance.server) for instance in table.instances]
    pairs = [(member, ports[member.index]) for member in table.members]
    addresses = tuple(_address(instance, port) for instance, port in pairs if port is not None)
    if not addresses:
        raise RanktableError(
            "NODE_PORTS is not set and no entry of the global table has a server_port: set NODE_PORTS to the --port of "
            f"each of the {len(pairs)} instances in table order, like NODE_PORTS={_example_ports(len(pairs))}"
        )
    return addresses, tuple(_no_port_note(instance) for instance, port in pairs if port is None)


def parse_node_ports(value: str, table: GlobalTable) -> tuple[int, ...]:
    """Parse NODE_PORTS, one port per instance in table order. Raises RanktableError naming NODE_PORTS and the value."""
    words = [word.strip() for word in value.split(",")]
    count = len(table.instances)
    if words == [""]:
        raise RanktableError(f"NODE_PORTS is empty: write one port per instance, like {_example_ports(count)}")
    ports = []
    for word in words:
        port = parse_port(word)
        if port is None:
            raise RanktableError(f'NODE_PORTS is "{value}": "{word}" is not a port from 1 to 65535')
        ports.append(port)
    if len(ports) != count:
        raise RanktableError(
            f'NODE_PORTS is "{value}": {counted_ports(len(ports))}, but the global table has {count} instances '
            f"({len(table.prefill)} prefill, {len(table.decode)} decode)"
        )
    _refuse_shared(value, ports, table.instances)
    return tuple(ports)


def refuse_port_of_scheduler(
    addresses: Sequence[InstanceAddress], scheduler: TableServer, port: int, source: str
) -> None:
    """Raise RanktableError naming the port's `source` if an instance on the scheduler's host has the same --port."""
    comparer = HostComparer()
    for one in addresses:
        if one.port == port and comparer.same(one.server.server_ip, scheduler.server_ip):
            raise RanktableError(
                f"{source} has port {port} on {one.server.server_ip} for {one.name}, and the "
                f"scheduler listens on --port {port} of that host: use different ports"
            )


def swapped_ports_warning(value: str, table: GlobalTable, index: int, port: int) -> str | None:
    """Return a warning if NODE_PORTS lists this instance's --port at another instance's position.

    The scheduler may then confuse the two. A port mapping, or a table that has changed since, looks the same. A value
    that does not fit the table is left for the scheduler to reject.
    """
    try:
        ports = parse_node_ports(value, table)
    except RanktableError:
        return None
    if port not in ports or ports[index] == port:
        return None
    return (
        f'NODE_PORTS is "{value}": the scheduler expects {table.instances[index]} on port {ports[index]}, and --port '
        f"is {port}, which is the port of {table.instances[ports.index(port)]}: check that the ports are in table "
        f"order, all prefill instances first, unless port {ports[index]} is mapped to {port} or the table has changed"
    )


def _refuse_shared(value: str, ports: Sequence[int], instances: Sequence[InstanceEntry]) -> None:
    comparer = HostComparer()
    for second, port in enumerate(ports):
        for first in range(second):
            hosts = (instances[first].server.server_ip, instances[second].server.server_ip)
            if ports[first] == port and comparer.same(*hosts):
                raise RanktableError(
                    f'NODE_PORTS is "{value}": port {port} occurs twice on {hosts[0]}, '
                    f"for {instances[first]} and {instances[second]}"
                )


def _address(instance: InstanceEntry, port: int) -> InstanceAddress:
    server = instance.server
    host, port = (server.server_ip, port) if server.url is None else url_place(server.url)
    return InstanceAddress(instance.role, server, dial_host(host), port, instance.index, instance.name)


def _no_port_note(instance: InstanceEntry) -> str:
    return (
        f"{instance} on {instance.server.server_ip} is ignored: {instance.json_path} of the global table has no "
        "server_port and NODE_PORTS is not set"
    )


def _example_ports(count: int) -> str:
    return ",".join(str(8088 + index) for index in range(count))
