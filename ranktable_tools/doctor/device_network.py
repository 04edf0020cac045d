"""Check the network between NPUs: links up, equal TLS switches, and pairs of devices that exchange KV."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import monotonic

from ranktable_tools.devices.hccn_answers import parse_link, parse_net_health, parse_ping, parse_tls_switch
from ranktable_tools.devices.npu_smi import parse_states, parse_super_pod
from ranktable_tools.doctor.case import DoctorInput
from ranktable_tools.doctor.machine import Machine
from ranktable_tools.doctor.verdict import Verdict, combined, counted, fail, not_here, ok, warn
from ranktable_tools.tables import InstanceEntry

MAX_PINGS = 64
_MAX_HOSTS = 4
_NO_NPU = "no NPU on this machine"
_NO_TOOL = "hccn_tool is not found (set HCCN_TOOL_PATH)"


@dataclass(frozen=True, slots=True)
class DevicePair:
    """A device of this host, and the device on another host with which it exchanges KV."""

    own: str
    peer_ip: str
    instance: InstanceEntry


def check_device_links(case: DoctorInput) -> Verdict:
    """Check that each device to check has its link up and, outside a super pod, no failed network detection."""
    answers = _query_devices(case, "-link")
    if isinstance(answers, Verdict):
        return answers
    in_super_pod = is_super_pod(case.machine)
    problems = []
    for device_id, text in answers:
        link = parse_link(text)
        if link != "UP":
            message = f"the link of device {device_id} is {link or 'unknown'}"
            step = f"hccn_tool -i {device_id} -link_stat -g; check cable and switch"
            # On a healthy A3 pod the links may be DOWN: there the pings decide.
            problems.append(warn(message, "on an A3 rely on the pings") if in_super_pod else fail(message, step))
    health = _query_devices(case, "-net_health")
    for device_id, text in [] if isinstance(health, Verdict) or in_super_pod else health:
        health_status = parse_net_health(text)
        if health_status not in (None, "Success"):
            step = f"hccn_tool -i {device_id} -netdetect -g; check the gateway it watches"
            problems.append(warn(f"the network health of device {device_id} is {health_status}", step))
    return combined(problems, f"{counted(len(answers), 'link')} up")


def check_tls(case: DoctorInput) -> Verdict:
    """Check that this host's devices to check have the same TLS switch: HCCL rejects a mix (EI0016)."""
    answers = _query_devices(case, "-tls")
    if isinstance(answers, Verdict):
        return answers
    switches = {device_id: parse_tls_switch(text) for device_id, text in answers}
    unknown = [device_id for device_id, switch in switches.items() if switch is None]
    if unknown:
        return warn(f"the TLS switch of device {unknown[0]} is unknown", f"hccn_tool -i {unknown[0]} -tls -g")
    if len(set(switches.values())) > 1:
        listed = ", ".join(f"device {device_id} has {switch}" for device_id, switch in switches.items())
        step = "; ".join(f"hccn_tool -i {one} -tls -s enable 0" for one, switch in switches.items() if switch != "0")
        return fail(f"the TLS switches differ: {listed}", step)
    switch = next(iter(switches.values()), "-")
    return ok(f"the TLS switch is {switch} on the devices {','.join(switches)} of this host{_not_compared(case)}")


def check_device_pairs(case: DoctorInput) -> Verdict:
    """Check that devices of this host reach those on other hosts with which they exchange KV.

    Pairs beyond `MAX_PINGS` or the time limit are not checked.
    """
    if case.machine.kind != "npu":
        return not_here(_NO_NPU)
    pairs = list(device_pairs(case))
    if not pairs:
        return not_here("no instance of the other role is on another host")
    if case.machine.tool("hccn_tool") is None:
        return not_here(_NO_TOOL)
    flags = ("-hccs_ping", "-ping") if is_super_pod(case.machine) else ("-ping",)
    verdicts = _ping_pairs(case, pairs, flags)
    of = f" (of {len(pairs)})" if len(pairs) > len(verdicts) else ""
    problems = [verdict for verdict in verdicts if verdict is not None]
    return combined(problems, f"{counted(len(verdicts), 'device pair')}{of} can communicate")


def device_pairs(case: DoctorInput) -> Iterator[DevicePair]:
    """Yield the pairs of devices that exchange KV: one here, the other in an instance of the other role elsewhere.

    Equal ranks are paired; the ranks of the smaller instance repeat.
    """
    own = case.here if case.tables.own is None else (case.tables.own,)
    for mine in own:
        for theirs in case.instances:
            if theirs.role == mine.role or case.is_here(theirs.server.server_ip):
                continue
            ranks = max(len(mine.server.devices), len(theirs.server.devices))
            for rank in range(ranks):
                own_device = mine.server.devices[rank % len(mine.server.devices)]
                peer_ip = theirs.server.devices[rank % len(theirs.server.devices)].device_ip
                if peer_ip is not None:
                    yield DevicePair(own_device.device_id, peer_ip, theirs)


def is_super_pod(machine: Machine) -> bool:
    """Return whether the cards are part of a super pod (A3)."""
    listed = machine.run_tool("npu-smi", "info")
    first = next(iter(parse_states(listed.text)), None) if listed is not None else None
    if first is None:
        return False
    where = ("-i", str(first.npu_id), "-c", str(first.chip_id))
    answer = machine.run_tool("npu-smi", "info", "-t", "spod-info", *where)
    return answer is not None and parse_super_pod(answer.text) is not None


def _not_compared(case: DoctorInput) -> str:
    """Name the other hosts with devices: hccn_tool only covers its own host."""
    hosts = dict.fromkeys(instance.server.server_ip for instance in case.instances)
    others = [host for host in hosts if not case.is_here(host)]
    if not others:
        return ""
    more = f" and {len(others) - _MAX_HOSTS} more" if len(others) > _MAX_HOSTS else ""
    return f"; not compared: {', '.join(others[:_MAX_HOSTS])}{more}, where `ranktable doctor` must show the same"


def _query_devices(case: DoctorInput, flag: str) -> Sequence[tuple[str, str]] | Verdict:
    """Return hccn_tool's output for each device to check."""
    if case.machine.kind != "npu":
        return not_here(_NO_NPU)
    if case.machine.tool("hccn_tool") is None:
        return not_here(_NO_TOOL)
    answers = [(one, case.machine.run_tool("hccn_tool", "-i", one, flag, "-g")) for one in case.wanted_devices]
    if not answers:
        return not_here("no device to check here")
    return [(device_id, answer.text) for device_id, answer in answers if answer is not None]


def _ping_pairs(case: DoctorInput, pairs: Sequence[DevicePair], flags: Sequence[str]) -> list[Verdict | None]:
    """Ping at least one pair, and up to `MAX_PINGS` until the time limit; None for each that responds."""
    deadline = monotonic() + case.pings_s
    verdicts: list[Verdict | None] = []
    for pair in pairs[:MAX_PINGS]:
        verdicts.append(_ping(case.machine, pair, flags))
        if monotonic() >= deadline:
            break
    return verdicts


def _ping(machine: Machine, pair: DevicePair, flags: Sequence[str]) -> Verdict | None:
    output = ""
    for flag in flags:
        answer = machine.run_tool("hccn_tool", "-i", pair.own, flag, "-g", "address", pair.peer_ip)
        if answer is not None and parse_ping(answer.text):
            return None
        output = answer.summary if answer is not None else output
    step = f"run hccn_tool -i {pair.own} -ip -g and -gateway -g here and on the other host; check the switch"
    return fail(f"device {pair.own} does not reach {pair.peer_ip} ({pair.instance}): {output}", step)
