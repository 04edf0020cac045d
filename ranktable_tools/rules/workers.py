"""Rules about workers of other engines, which only lint checks: a table that violates them still works in part."""

from collections.abc import Iterator

from ranktable_tools.document import Problem, shown
from ranktable_tools.reading import LocatedServer, TableReading
from ranktable_tools.rules.clashes import Claim, clashes
from ranktable_tools.rules.rule import Rule, RuleOptions
from ranktable_tools.rules.servers import api_ports
from ranktable_tools.tables import InstanceRole, TableServer
from ranktable_tools.worker_ports import PORT_NAMES, kv_ports

_HTTP = "its API"


def _ports(reading: TableReading, options: RuleOptions) -> Iterator[Problem]:
    what_by_path = dict(_uses(reading))
    seen = set[tuple[str, str]]()
    for claim, first in clashes(_claims(reading)):
        what, other = what_by_path[claim.json_path], what_by_path[first.json_path]
        pair = (claim.json_path, first.json_path)
        if pair in seen or (what, other) == (_HTTP, _HTTP):  # `port-twice` reports those
            continue
        seen.add(pair)
        found = f"takes port {claim.value} on {claim.host} for {what}, but {first.json_path} takes it for {other}"
        advice = "give them other ports or devices: KV ports follow from the lowest device_id"
        yield Problem("worker-port-twice", claim.json_path, claim.value, found, advice)


def _claims(reading: TableReading) -> Iterator[Claim]:
    """Yield the ports of all entries, and the KV ports of the workers that start_servers.sh would start."""
    yield from api_ports(reading)
    for located in reading.instance_servers:
        if located.server.url is None:
            for port in kv_ports(located.server):
                yield Claim(str(port), located.server.server_ip, f"{located.json_path}.device")


def _uses(reading: TableReading) -> Iterator[tuple[str, str]]:
    for located in reading.servers:
        yield from ((f"{located.json_path}.{key}", _HTTP) for key in ("server_port", "url"))
        if located.server.worker is not None:
            yield f"{located.json_path}.device", PORT_NAMES[located.server.worker]


def _sizes(reading: TableReading, options: RuleOptions) -> Iterator[Problem]:
    prefill, decode = _workers(reading, "prefill"), _workers(reading, "decode")
    for role in (prefill, decode):
        yield from _uneven(role)
    for instance in decode:
        for other in prefill:
            advice = _unfit(other.server, instance.server)
            if advice is not None:
                num, theirs = len(instance.server.devices), len(other.server.devices)
                found = f"has {num} device{'s' if num > 1 else ''}, and {other.json_path} has {theirs}"
                yield Problem("worker-sizes", f"{instance.json_path}.device", num, found, advice)
                break


def _uneven(workers: list[LocatedServer]) -> Iterator[Problem]:
    """Yield the vllm-ascend workers of one role that differ in size: a worker supports one size for each role."""
    ascend = [located for located in workers if located.server.worker == "vllm-ascend"]
    for located in ascend[1:]:
        num, first = len(located.server.devices), len(ascend[0].server.devices)
        if num != first:
            found = f"has {num} device{'s' if num > 1 else ''}, and {ascend[0].json_path} has {first}"
            advice = "MooncakeConnectorV1 supports one size for each role: give all workers of a role as many devices"
            yield Problem("worker-sizes", f"{located.json_path}.device", num, found, advice)


def _unfit(prefill: TableServer, decode: TableServer) -> str | None:
    """Return why KV cannot be sent from one to the other with their tensor-parallel sizes, or None."""
    if prefill.worker != decode.worker:
        return None
    ours, theirs = len(prefill.devices), len(decode.devices)
    if prefill.worker == "vllm-ascend":  # kv_p2p/mooncake_connector.py, MooncakeConnectorWorker.__init__
        return None if ours >= theirs else "MooncakeConnectorV1 requires at least as many in prefill as in decode"
    # kv_connector/utils.py, TransferTopology.tp_ratio
    fits = max(ours, theirs) % min(ours, theirs) == 0
    return None if fits else "NixlConnector requires that one size divides the other"


def _workers(reading: TableReading, role: InstanceRole) -> list[LocatedServer]:
    return [one for one in _of_role(reading, role) if one.server.worker is not None and one.server.devices]


def _of_role(reading: TableReading, role: InstanceRole) -> list[LocatedServer]:
    return [located for instance in reading.instances if instance.role == role for located in instance.servers]


def _kinds(reading: TableReading, options: RuleOptions) -> Iterator[Problem]:
    prefill, decode = _of_role(reading, "prefill"), _of_role(reading, "decode")
    if not prefill or not decode:
        return
    for mine, others, role in ((prefill, decode, "decode"), (decode, prefill, "prefill")):
        lonely = {located.server.worker for located in mine} - {located.server.worker for located in others}
        for kind in sorted(lonely, key=str):
            here = next(located.json_path for located in mine if located.server.worker == kind)
            there = others[0]
            found = f"is {_engine(kind)}, but {there.json_path}.worker is {_engine(there.server.worker)}"
            advice = f"list a {role} instance of the same engine: KV is sent only between those"
            yield Problem("worker-kinds", f"{here}.worker", kind, found, advice)


def _engine(kind: str | None) -> str:
    return "missing, so pdserve's own" if kind is None else shown(kind)


WORKER_RULES = (
    Rule("worker-port-twice", "the KV ports of workers, which follow from their devices, are free", _ports),
    Rule("worker-sizes", "the connector of workers supports the number of devices of both roles", _sizes),
    Rule("worker-kinds", "each engine has instances of both roles", _kinds),
)
