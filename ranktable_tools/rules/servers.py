"""Rules about servers and instances: their number, ports, and reachability from other hosts."""

from collections.abc import Iterator

from ranktable_tools.addresses import HostComparer, canonical, is_address
from ranktable_tools.dialects.mindie import MAX_COORDINATORS
from ranktable_tools.document import Problem, shown
from ranktable_tools.reading import TableReading
from ranktable_tools.rules.clashes import Claim, clashes
from ranktable_tools.rules.rule import Rule, RuleOptions
from ranktable_tools.tables import WORKER_KINDS
from ranktable_tools.worker_urls import url_place

_MAX_SCHEDULERS = {"mindie": MAX_COORDINATORS}


def _check_schedulers(reading: TableReading, options: RuleOptions) -> Iterator[Problem]:
    limit, found = _MAX_SCHEDULERS.get(reading.dialect, 1), len(reading.schedulers)
    if found > limit:
        json_path = reading.schedulers[0].json_path.rpartition(".")[0] or "server_list"
        advice = f"must have {'at most ' if limit > 1 else ''}{limit}"
        yield Problem("scheduler-count", json_path, found, f"has {found} schedulers", advice)


def _workers(reading: TableReading, options: RuleOptions) -> Iterator[Problem]:
    for located in reading.schedulers:
        if located.server.worker is not None:
            found, advice = f"is {shown(located.server.worker)}", "must be absent: the scheduler is pdserve's own"
            yield Problem("worker-entry", f"{located.json_path}.worker", located.server.worker, found, advice)
    for located in reading.servers:
        if located.server.url is not None and located.server.worker is None:
            kinds = " or ".join(map(shown, WORKER_KINDS))
            found, advice = f"is {shown(located.server.url)}", f"add the key worker, {kinds}: only a worker has a URL"
            yield Problem("worker-entry", f"{located.json_path}.url", located.server.url, found, advice)


def _port_twice(reading: TableReading, options: RuleOptions) -> Iterator[Problem]:
    for claim, first in clashes(api_ports(reading)):
        found = f"names port {claim.value} on {claim.host}, as {first.json_path} does"
        yield Problem("port-twice", claim.json_path, claim.value, found, "give each instance of a host its own port")


def api_ports(reading: TableReading) -> Iterator[Claim]:
    """Yield the port of every entry's API, with the JSON path of the key that has it; a combined worker's port once."""
    prefill, decode = (
        [one for instance in reading.instances if instance.role == role for one in instance.servers]
        for role in ("prefill", "decode")
    )
    combined = {(one.server.worker, one.server.url) for one in prefill if one.server.url is not None}
    again = [one for one in decode if (one.server.worker, one.server.url) in combined]
    for located in reading.servers:
        if located in again:
            continue
        one, json_path = located.server, located.json_path
        if one.server_port is not None:
            yield Claim(str(one.server_port), one.server_ip, f"{json_path}.server_port")
        if one.url is not None and url_place(one.url) != (one.server_ip, one.server_port):
            host, port = url_place(one.url)
            yield Claim(str(port), host, f"{json_path}.url")


def _check_loopback(reading: TableReading, options: RuleOptions) -> Iterator[Problem]:
    """Report loopback addresses: other hosts would reach themselves. Allowed if all entries are of this machine.

    Only the scheduler connects to a URL.
    """
    servers = [(located.json_path, located.server) for located in reading.servers if located.server.url is None]
    local = [(json_path, server) for json_path, server in servers if _is_loopback(server.server_ip)]
    others = [server.server_ip for _, server in servers if not _is_loopback(server.server_ip)]
    hosts = HostComparer()
    other = next((host for host in dict.fromkeys(others) if local and not hosts.same("localhost", host)), None)
    if other is None:
        return
    for json_path, server in local:
        found = f"is {shown(server.server_ip)}, and the table also has {other}"
        advice = "write the address at which others reach this host"
        yield Problem("loopback", f"{json_path}.server_ip", server.server_ip, found, advice)


def _loopback_device(reading: TableReading, options: RuleOptions) -> Iterator[Problem]:
    several = len({canonical(located.server.server_ip) for located in reading.servers}) > 1
    for located in reading.instance_servers if several else ():
        if _is_loopback(located.server.server_ip):
            continue
        for json_path, device in located.located_devices:
            if device.device_ip is not None and _is_loopback(device.device_ip) and is_address(device.device_ip):
                found = f"is {shown(device.device_ip)} on {located.server.server_ip}"
                advice = "write the device's own address, or the host's if it has none"
                yield Problem("loopback-device", f"{json_path}.device_ip", device.device_ip, found, advice)


def _unequal_sizes(reading: TableReading, options: RuleOptions) -> Iterator[Problem]:
    sizes = [len(list(instance.located_devices)) for instance in reading.instances]
    for instance, size in zip(reading.instances, sizes, strict=True):
        if size and sizes[0] and size != sizes[0]:
            first = reading.instances[0].json_path
            found = f"has {size} device{'s' if size != 1 else ''}, and {first} has {sizes[0]}"
            yield Problem("unequal-tensor-parallel", instance.json_path, size, found, _size_advice(reading))
            return


def _size_advice(reading: TableReading) -> str:
    prefill, decode = (
        {len(list(one.located_devices)) for one in reading.instances if one.role == role}
        for role in ("prefill", "decode")
    )
    if len(prefill) > 1:
        rule = "All the tensor-parallel-size of the prefill server must be same."
    elif len(decode) > 1:
        rule = "All the tensor-parallel-size of the decode server must be same."
    else:
        rule = "The tensor-parallel-size of prefill server and decode server must be same."
    return f"ModelArts' own tool requires: {rule} pdserve's own instances may differ"


def _over_hosts(reading: TableReading, options: RuleOptions) -> Iterator[Problem]:
    for instance in reading.instances:
        if reading.dialect == "modelarts" and len(instance.servers) > 1:
            found = f"has {len(instance.servers)} servers"
            advice = "pdserve cannot start an instance over several servers; the table is for other tools"
            yield Problem(
                "instance-over-servers", instance.json_path or "server_list", len(instance.servers), found, advice
            )


def _is_loopback(host: str) -> bool:
    return canonical(host) == "localhost" or host.startswith("127.")


SERVER_RULES = (
    Rule("scheduler-count", "there is one scheduler (MindIE: at most two coordinators)", _check_schedulers),
    Rule("worker-entry", "only an instance is a worker of another engine, and only a worker has a URL", _workers),
    Rule("port-twice", "a port of a host is used by one instance", _port_twice),
    Rule("loopback", "no loopback address if the table has several hosts", _check_loopback),
    Rule("loopback-device", "no loopback address for a device if the table has several hosts", _loopback_device),
    Rule("unequal-tensor-parallel", "all instances have as many devices as the first", _unequal_sizes, "note"),
    Rule("instance-over-servers", "an instance of pdserve is on one server", _over_hosts, "note"),
)
