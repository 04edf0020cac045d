"""Rules of HCCL's own tables: unique servers, device addresses between hosts, adjacent servers per super pod."""

from collections.abc import Iterator

from ranktable_tools.document import Problem, shown
from ranktable_tools.reading import TableReading
from ranktable_tools.rules.rule import Rule, RuleOptions


def _server_id_twice(reading: TableReading, options: RuleOptions) -> Iterator[Problem]:
    seen: dict[str, str] = {}
    for located in reading.servers if _is_hccl(reading) else ():
        server_id = located.server.server_id
        first = seen.setdefault(server_id, located.json_path)
        if first != located.json_path:
            found = f"is {shown(server_id)}, which {first} has too"
            advice = "HCCL requires one entry per server: join their devices"
            yield Problem("server-id-twice", f"{located.json_path}.server_id", server_id, found, advice)


def _device_ip_missing(reading: TableReading, options: RuleOptions) -> Iterator[Problem]:
    servers = list(reading.servers) if _is_hccl(reading) else []
    for located in servers if len(servers) > 1 else ():
        for json_path, device in located.located_devices:
            if device.device_ip is None:
                advice = f"write the device's address: the table has {len(servers)} servers"
                yield Problem("no-device-ip", f"{json_path}.device_ip", None, "is missing", advice)


def _no_super_device(reading: TableReading, options: RuleOptions) -> Iterator[Problem]:
    for located in reading.instance_servers if reading.dialect == "hccl-1.2" else ():
        for json_path, device in located.located_devices:
            if device.super_device_id is None:
                here = f"{json_path}.super_device_id"
                yield Problem("no-super-device", here, None, "is missing", "write the device's id in its super pod")


def _super_device_twice(reading: TableReading, options: RuleOptions) -> Iterator[Problem]:
    seen: dict[tuple[str | None, str], str] = {}
    for located in reading.instance_servers:
        for json_path, device in located.located_devices:
            here, super_id = f"{json_path}.super_device_id", device.super_device_id
            if super_id is None:
                continue
            first = seen.setdefault((located.server.super_pod_id, super_id), here)
            if first != here:
                found, advice = (
                    f"is {shown(super_id)}, as {first} is",
                    "each device of a super pod has its own",
                )
                yield Problem("super-device-twice", here, super_id, found, advice)


def _pods_apart(reading: TableReading, options: RuleOptions) -> Iterator[Problem]:
    done: set[str] = set()
    last: str | None = None
    for located in reading.instance_servers if reading.dialect == "hccl-1.2" else ():
        pod = located.server.super_pod_id
        if pod is not None and pod != last and pod in done:
            found = f"is of super pod {pod}, with servers of another pod in between"
            yield Problem(
                "super-pod-apart", located.json_path, pod, found, "list the servers of one super pod together"
            )
        if pod is not None:
            done.add(pod)
        last = pod


def _is_hccl(reading: TableReading) -> bool:
    return reading.dialect.startswith("hccl-")


HCCL_RULES = (
    Rule("server-id-twice", "HCCL: a server_id is unique", _server_id_twice),
    Rule("no-device-ip", "HCCL: between hosts each device has an address", _device_ip_missing),
    Rule("no-super-device", "HCCL 1.2: each device has a super_device_id", _no_super_device),
    Rule("super-device-twice", "a super_device_id is unique in its super pod", _super_device_twice),
    Rule("super-pod-apart", "HCCL 1.2: the servers of a super pod are adjacent", _pods_apart),
)
