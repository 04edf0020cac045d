"""Rules about devices: their owners, ranks, and values that must be unique."""

import json
from collections.abc import Iterator
from ipaddress import ip_address

from ranktable_tools.addresses import HostComparer, canonical, is_address
from ranktable_tools.document import Problem, shown
from ranktable_tools.reading import TableReading
from ranktable_tools.rules.clashes import Claim, clashes
from ranktable_tools.rules.rule import Rule, RuleOptions

_ONCE = "A device_id can be used only once in prefill server and decode server."


def _scheduler_device(reading: TableReading, options: RuleOptions) -> Iterator[Problem]:
    for located in reading.schedulers:
        ids = located.server.device_ids
        if ids:
            advice = "must be absent: the scheduler has no device"
            yield Problem("scheduler-device", f"{located.json_path}.device", ids, f"is {shown(ids)}", advice)


def _no_device(reading: TableReading, options: RuleOptions) -> Iterator[Problem]:
    for located in reading.instance_servers:
        if not located.server.devices and located.server.worker is None:
            advice = "list the devices of this instance"
            yield Problem("no-device", f"{located.json_path}.device", None, "is missing", advice)


def _check_ranks(reading: TableReading, options: RuleOptions) -> Iterator[Problem]:
    for instance in reading.instances:
        ranks = [device.rank_id for _, device in instance.located_devices]
        wanted = [str(rank) for rank in range(len(ranks))]
        if sorted(ranks, key=int) != wanted:
            alone = instance.json_path == instance.servers[0].json_path
            json_path = f"{instance.json_path}.device" if alone else instance.json_path or "server_list"
            advice = f"must be {_format_list(wanted)}: from 0, without a gap, each once"
            yield Problem("rank-id", json_path, ranks, f"has the rank_ids {_format_list(ranks)}", advice)


def _device_twice(reading: TableReading, options: RuleOptions) -> Iterator[Problem]:
    claims = [
        Claim(device.device_id, located.server.server_ip, f"{json_path}.device_id", owner)
        for owner, instance in enumerate(reading.instances)
        for located in instance.servers
        for json_path, device in located.located_devices
    ]
    for claim, first in clashes(claims):
        if options.share_devices and claim.owner != first.owner:
            continue
        found = f"is {shown(claim.value)} on {claim.host}, as {first.json_path} is"
        yield Problem("device-twice", claim.json_path, claim.value, found, _ONCE)


def _repeated_devices(reading: TableReading, options: RuleOptions) -> Iterator[Problem]:
    """Check instances that share all their devices or list none; `_device_twice` reports all others."""
    claims = [
        Claim(f"{one.device_ids} {one.server_port}", one.server_ip, located.json_path)
        for located in reading.instance_servers
        for one in (located.server,)
        if one.url is None and (options.share_devices or one.worker)
    ]
    for claim, first in clashes(claims) if reading.kind == "cluster" else ():
        found = f"has the host, devices and port of {first.json_path}"
        advice = "give each its own server_port, so that their local tables differ"
        yield Problem("same-entry", claim.json_path, None, found, advice)


def _device_ip_twice(reading: TableReading, options: RuleOptions) -> Iterator[Problem]:
    hosts = HostComparer()
    seen: dict[str, tuple[str, str, str]] = {}
    for located in reading.instance_servers:
        host = located.server.server_ip
        for json_path, device in located.located_devices:
            address, key = device.device_ip, (host, device.device_id)
            if address is None:
                continue
            first = seen.setdefault(address, (*key, json_path))
            if first[:2] != key and not hosts.same(address, host):
                found = f"is {shown(address)}, as {first[2]} is"
                advice = "each device needs its own address (only the host's address, on CPU and GPU, may repeat)"
                yield Problem("device-ip-twice", f"{json_path}.device_ip", address, found, advice)


def _device_names(reading: TableReading, options: RuleOptions) -> Iterator[Problem]:
    """Require addresses: the device network has no names. A device with its host's address may use the host's name."""
    for located in reading.instance_servers:
        own = canonical(located.server.server_ip) if reading.dialect == "modelarts" else None
        for json_path, device in located.located_devices:
            named = {"device_ip": device.device_ip, "backup_device_ip": device.backup_device_ip}
            for key, text in named.items():
                if text is not None and not is_address(text) and (key != "device_ip" or canonical(text) != own):
                    found = f"is {shown(text)}, a host name"
                    advice = "write the device's numeric address"
                    yield Problem("device-name", f"{json_path}.{key}", text, found, advice)


def _mixed_families(reading: TableReading, options: RuleOptions) -> Iterator[Problem]:
    for instance in reading.instances:
        first: tuple[int, str] | None = None
        for json_path, device in instance.located_devices:
            family = _address_family(device.device_ip)
            if family is None:
                continue
            if first is not None and family != first[0]:
                found = f"is {shown(device.device_ip)}, IPv{family}, and that of {first[1]} is IPv{first[0]}"
                advice = "the devices of one instance need addresses of one family"
                yield Problem("device-ip-family", f"{json_path}.device_ip", device.device_ip, found, advice)
            first = first or (family, json_path)


def _address_family(text: str | None) -> int | None:
    try:
        return None if text is None else ip_address(text).version
    except ValueError:
        return None


def _format_list(values: list[str]) -> str:
    return json.dumps(values) if len(values) <= 16 else shown(values)


DEVICE_RULES = (
    Rule("scheduler-device", "the scheduler has no device", _scheduler_device),
    Rule("no-device", "each server entry of an instance lists its devices, unless it is another engine's", _no_device),
    Rule("rank-id", "ranks count from 0 without a gap, over all servers of an instance", _check_ranks),
    Rule("device-twice", "a device of a host is used once, in one instance", _device_twice),
    Rule("same-entry", "instances that share all their devices, or list none, differ in their port", _repeated_devices),
    Rule(
        "device-name",
        "a device's address is numeric; a host name is accepted only if it is its entry's server_ip (CPU, GPU)",
        _device_names,
    ),
    Rule("device-ip-twice", "no two devices have the same address, except their host's", _device_ip_twice),
    Rule("device-ip-family", "the device addresses of an instance are of one IP family", _mixed_families),
)
