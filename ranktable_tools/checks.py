"""Check what spans several servers: no device and no port may stand twice on one host."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ranktable_tools.addresses import HostComparer
from ranktable_tools.document import Problem, shown
from ranktable_tools.modelarts import PlacedServer


def check_across(servers: Sequence[PlacedServer]) -> list[Problem]:
    """Return the devices and ports that two of these instances share."""
    devices = [
        _Claim(device.device_id, placed.server.server_ip, f"{placed.place}.device[{position}].device_id")
        for placed in servers
        for position, device in enumerate(placed.server.devices)
    ]
    ports = [
        _Claim(str(placed.server.server_port), placed.server.server_ip, f"{placed.place}.server_port")
        for placed in servers
        if placed.server.server_port is not None
    ]
    hosts = HostComparer()
    return [
        *_clashes(hosts, devices, "A device_id can be used only once in prefill server and decode server."),
        *_clashes(hosts, ports, "give each instance of a host its own port"),
    ]


@dataclass(frozen=True, slots=True)
class _Claim:
    value: str
    host: str
    place: str


def _clashes(hosts: HostComparer, claims: Iterable[_Claim], advice: str) -> list[Problem]:
    seen: defaultdict[str, list[_Claim]] = defaultdict(list)
    problems: list[Problem] = []
    for claim in claims:
        first = next((other for other in seen[claim.value] if hosts.same(other.host, claim.host)), None)
        if first is not None:
            found = f"is {shown(claim.value)} on {claim.host}, which {first.place} uses already"
            problems.append(Problem(claim.place, found, advice))
        seen[claim.value].append(claim)
    return problems
