"""Check addresses and ports: this host's are free or speak gRPC or TLS, the other hosts' can be reached."""

import ipaddress
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ranktable_tools.addresses import canonical, dial_host, own_hosts
from ranktable_tools.doctor.case import DoctorInput
from ranktable_tools.doctor.listeners import listener
from ranktable_tools.doctor.machine import Machine
from ranktable_tools.doctor.tcp import PortAnswer, can_listen, probe_port
from ranktable_tools.doctor.verdict import Verdict, combined, counted, fail, not_here, ok, warn
from ranktable_tools.errors import RanktableError
from ranktable_tools.node_ports import InstanceAddress

_PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy")
_MAX_CONNECTIONS = 32


def check_address(case: DoctorInput) -> Verdict:
    """Check that this host is in the table; with a local table, that its address is one of this machine's.

    That address must not be localhost if the table has other hosts.
    """
    tables = case.tables
    if tables.local is None:
        if case.hosts and not any(map(case.is_here, case.hosts)):
            return warn(f"none of the table's hosts is this one: {', '.join(case.hosts)}", "run this on one of them")
        return ok(f"this host is in the table: {_own_host(case)}") if case.hosts else not_here("no table was given")
    own = tables.local.server.server_ip
    if not case.is_here(own):
        numbers = ", ".join(sorted(host for host in own_hosts() if host[0].isdigit() or ":" in host))
        return fail(f"the local table says {own}, but this machine has {numbers}", "use the local table of this host")
    others = [host for host in case.hosts if not case.is_here(host)]
    if canonical(own) == "localhost" and others:
        step = "generate this host's tables again with --ip, and merge"
        return fail(f"the local table says {own}, which {others[0]} cannot reach", step)
    return ok(f"{own} is this machine's")


def check_ports(case: DoctorInput) -> Verdict:
    """Check that each port of this host's instances is free or speaks gRPC or TLS; another engine's may differ."""
    found = _addresses(case)
    if isinstance(found, Verdict):
        return found
    here = [one for one in found if case.is_here(one.server.server_ip)]
    if not here:
        return not_here("no instance of the table is on this host")
    answers = _probe_ports(here, case.connect_s)
    answered = zip(here, answers, strict=True)
    problems = [problem for one, answer in answered if (problem := _check_taken(case.machine, one, answer))]
    states = (f"{one.port} {_state(answer)}" for one, answer in zip(here, answers, strict=True))
    return combined(problems, ", ".join(states))


def check_reach(case: DoctorInput) -> Verdict:
    """Check that this host reaches the instances on other hosts that its processes connect to."""
    found = _addresses(case)
    if isinstance(found, Verdict):
        return found
    wanted = _roles_to_reach(case)
    remote = [one for one in found if one.role in wanted and not case.is_here(one.server.server_ip)]
    if not remote:
        return not_here("this host connects to no other host of the table")
    answers = _probe_ports(remote, case.connect_s)
    problems = [
        problem for one, answer in zip(remote, answers, strict=True) if (problem := _check_reachable(one, answer))
    ]
    return combined(problems, f"{counted(len(remote), 'instance')} on other hosts can be reached")


def check_proxy(case: DoctorInput) -> Verdict:
    """Check that clients in this environment bypass its proxy for the table's hosts and localhost.

    pdserve's own processes never use a proxy.
    """
    environ = case.machine.environ
    spelled = [name for lower in _PROXY_VARIABLES for name in (lower, lower.upper()) if environ.get(name)]
    if not spelled:
        return ok("no proxy is set")
    no_proxy = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    hosts = tuple(dict.fromkeys((*case.hosts, "localhost", "127.0.0.1")))
    proxied = [host for host in hosts if not bypasses(host, no_proxy)]
    are_set = f"{', '.join(spelled)} {'is' if len(spelled) == 1 else 'are'} set"
    if not proxied:
        return ok(f"{are_set}, and no_proxy has every host")
    listed = ",".join(proxied)
    return warn(
        f"{are_set}, but no_proxy lacks {listed}: requests there would go through the proxy",
        f"export no_proxy=${{no_proxy:+$no_proxy,}}{listed}",
    )


def bypasses(host: str, no_proxy: str) -> bool:
    """Return whether `no_proxy` includes a host: by name, domain suffix, network, or `*` for all."""
    for entry in (word.strip().lower() for word in no_proxy.split(",")):
        if entry == "*" or (entry and (host.lower() == entry or host.lower().endswith("." + entry.lstrip(".")))):
            return True
        if "/" in entry and _is_in(host, entry):
            return True
    return False


def _is_in(host: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


def _own_host(case: DoctorInput) -> str:
    return next(host for host in case.hosts if case.is_here(host))


def _addresses(case: DoctorInput) -> Sequence[InstanceAddress] | Verdict:
    if case.tables.table is None:
        return not_here("no global table was given")
    try:
        return case.addresses()
    except RanktableError as error:
        if case.machine.environ.get("NODE_PORTS"):
            return fail(str(error), "set NODE_PORTS to each instance's --port in the table's order")
        step = "set NODE_PORTS, or generate the tables with --ports"
        return not_here("the table has no server_port and NODE_PORTS is not set", step)


def _roles_to_reach(case: DoctorInput) -> set[str]:
    """Return the roles to connect to: both for the scheduler; for an instance the other role (both ends open links)."""
    table, local = case.tables.table, case.tables.local
    if local is None:
        own = {one.role for one in case.here}
        scheduler = table is not None and case.is_here(table.scheduler.server_ip)
    else:
        own = set() if case.tables.own is None else {case.tables.own.role}
        scheduler = case.tables.own is None
    if scheduler or not own:
        return {"prefill", "decode"}
    return {"decode" if role == "prefill" else "prefill" for role in own}


def _probe_ports(found: Sequence[InstanceAddress], timeout_s: float) -> list[PortAnswer]:
    probe: Callable[[InstanceAddress], PortAnswer] = lambda one: probe_port(one.host, one.port, timeout_s)  # noqa: E731
    with ThreadPoolExecutor(min(len(found), _MAX_CONNECTIONS)) as pool:
        return list(pool.map(probe, found))


def _check_taken(machine: Machine, one: InstanceAddress, answer: PortAnswer) -> Verdict | None:
    where = f"{dial_host(one.server.server_ip)}:{one.port} ({one.role})"
    if answer.state == "other" and one.server.worker is None:
        owner = listener(machine, one.port)
        step = f"stop {owner or 'what listens there (ss -ltnp)'}, or start the instance on another --port"
        return fail(f"{where} is taken by {owner or 'something'}, which does not speak gRPC", step)
    if answer.state == "free":
        reason = can_listen(dial_host(one.server.server_ip), one.port)
        return None if reason is None else fail(f"{where} cannot be listened on: {reason}", "choose another --port")
    if answer.state in ("gRPC", "TLS", "other"):  # a worker of another engine speaks HTTP
        return None
    return fail(f"{where}: {answer.reason}", "check this host's firewall")


def _check_reachable(one: InstanceAddress, answer: PortAnswer) -> Verdict | None:
    where = f"{one.server.server_ip}:{one.port} ({one.role})"
    if answer.state == "free":
        return warn(f"nothing listens at {where}", "start that instance")
    if answer.state in ("silent", "unreachable"):
        step = f"check firewalls and routes between here and {one.server.server_ip} (docs/ports.md)"
        return fail(f"{where}: {answer.reason}", step)
    if answer.state == "other" and one.server.worker is None:
        return warn(f"{where} responds, but not with gRPC", "check the --port of that instance")
    return None


def _state(answer: PortAnswer) -> str:
    return {"free": "is free", "TLS": "answers with TLS"}.get(answer.state, "answers")
