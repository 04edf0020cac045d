"""`pdserve status`: one line per instance, from the scheduler's /metrics and, for `up`, the run folder."""

import argparse
import socket
from collections.abc import Iterator, Mapping, Sequence

from pdserve.client import Client, Sample
from pdserve.cluster_page import InstanceRow, LinkRow, read_page, read_roles_gone, read_table
from pdserve.flags.parser import CommandParser
from pdserve.question import served_model
from pdserve.readiness import check_ready
from pdserve.replacement import NAMES, SERVING, describe
from pdserve.run_folder import ClusterState, ProcessRecord, resident_bytes
from pdserve.supervisor_log import in_utc
from pdserve.target_cluster import TargetCluster, add_where, find
from pdserve.text_table import on_or_off, printable, text_table
from ranktable_tools.worker_urls import url_place
from wire.errors import Unavailable
from wire.link_reasons import is_failure

_TIMEOUT_S = 3.0
_ANSWER_S = 0.5
_HEADER = (
    "NAME", "ROLE", "ADDRESS", "PID", "STATE", "RESTARTS", "KV BLOCKS", "RUNNING", "WAITING", "DIGESTS", "LINKS",
)  # fmt: skip
_MAX_REASON_CHARS = 80
EPILOG = """\
PID is that of the process that `pdserve up` started, `-` if another one answers in its place, and on a Ray node.
STATE is the scheduler's: `starting` loads its model, `suspect` is silent and gets no new request, `lost` is not used
until it answers again, `draining` left the table and finishes its requests, `gone` does not answer. The supervisor of
`pdserve up` adds `starting again`, `given up` and `removed`. The lines below the table give the reasons.
With several schedulers, each is `ready`, `not ready` or `silent`; the first line is the answer of one of them.
RESTARTS counts how often the supervisor restarted the process.
DIGESTS shows whether an instance wants each KV frame checked; a link omits digests only if both ends have them off.
LINKS shows the transport over which each prefill instance sends KV; `(fallback: shm: why)` names a better one that
failed, `(not shm: why)` one that the pair cannot use, NO LINK a pair without any transport: it serves no prompt.
`pdserve links` measures them. Exit status: 0 when the first line says ready, else 1.

examples:
  pdserve status                               the cluster of `pdserve up`, else the one on port 9000
  pdserve status --url http://10.0.0.18:9000   any cluster, however it was started
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0 when the cluster is ready, 1 when it is not or nothing runs."""
    parser = CommandParser(
        prog="pdserve status", description="Show the instances of a running cluster and the links between them.",
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_where(parser)
    arguments = parser.parse_args(argv)
    where = find(arguments.url, arguments.run_dir)
    client = Client(where.base_url, timeout_s=_TIMEOUT_S)
    ready, missing = check_ready(client)
    samples = _metric_samples(client, where)
    instances = _instances(samples, where)
    condition = "ready" if ready else f"not ready: {missing or 'no answer'}"
    heads = [where.base_url, condition, f"model {_model(client, where)}", *_cluster_lines(samples, where)]
    print(printable("  ".join(heads)))
    for line in table(where.state, instances, _reasons(client), _scheduler_states(where)):
        print(line)
    return 0 if ready else 1


def table(
    state: ClusterState | None, instances: Sequence[InstanceRow], reasons: Mapping[str, str] | None = None,
    schedulers: Mapping[str, str] | None = None,
) -> list[str]:  # fmt: skip
    """Return the lines of the table, header first: the processes of `state`, then the instances not among them.

    Lines below the table explain why instances are not living: `reasons` has the text for each address. `schedulers`
    has the state of each scheduler, by address.
    """
    by_address = {one.address: one for one in instances}
    processes = () if state is None else state.processes
    rows = []
    for process in processes:
        seen = by_address.get(process.address)
        pid, condition = _condition(process, seen)
        if condition == "running":
            condition = (schedulers or {}).get(process.address, condition)
        role = process.role if seen is None else seen.role
        rows.append(_row(process.name, role, process.address, pid, condition, str(process.restarts), seen))
    ours = {process.address for process in processes}
    others = [one for one in instances if one.address not in ours]
    rows += [_row(one.name, one.role, one.address, "-", one.state, "-", one) for one in others]
    notes = [
        *_engines(instances),
        *_problem_lines(rows, reasons or {}),
        *map(_replaced, filter(_was_replaced, processes)),
    ]
    return [*text_table(_HEADER, rows), *notes]


def _engines(instances: Sequence[InstanceRow]) -> list[str]:
    """Return which instances are workers of another engine, by engine."""
    names: dict[str, list[str]] = {}
    for one in instances:
        if one.engine not in ("", "pdserve"):
            names.setdefault(one.engine, []).append(one.name)
    return [printable(f"{', '.join(those)}: {engine}") for engine, those in names.items()]


def _condition(process: ProcessRecord, seen: InstanceRow | None) -> tuple[str, str]:
    """Return pid and state; another process may answer in place of one that is gone."""
    if process.alive:
        return str(process.pid), "running" if seen is None else seen.state
    if process.note:
        return "-", process.note
    if seen is not None and (seen.state == "living" or _is_listening(process.address)):
        return "-", seen.state
    if not process.is_here:
        return "-", "starting" if seen is None else seen.state
    return str(process.pid), "gone"


def _is_listening(address: str) -> bool:
    try:
        with socket.create_connection(url_place(address), _ANSWER_S):
            return True
    except (OSError, ValueError):
        return False


def _problem_lines(rows: Sequence[Sequence[str]], reasons: Mapping[str, str]) -> list[str]:
    return [
        printable(f"{name} is {condition}: {reasons[address]}")
        for name, _, address, _, condition, *_ in rows
        if condition not in ("living", "gone") and reasons.get(address)
    ]


def _was_replaced(process: ProcessRecord) -> bool:
    return bool(process.phases)


def _replaced(process: ProcessRecord) -> str:
    """Return how long its last replacement took, or its current phase: a record changes only when a phase ends."""
    how = "from the spare" if process.from_spare else "by a new process"
    last, phases = process.phases[-1].name, describe(process.phases)
    if last != SERVING:
        return f"replacing {process.name} {how}: {phases}, now {NAMES[NAMES.index(last) + 1]}"
    seconds = sum(phase.seconds for phase in process.phases)
    at = "" if process.replaced_at is None else f" at {in_utc(process.replaced_at)}"
    return f"replaced {process.name}{at} in {seconds:.1f} s {how}: {phases}"


def _row(
    name: str, role: str, address: str, pid: str, condition: str, restarts: str, seen: InstanceRow | None
) -> tuple[str, ...]:  # fmt: skip
    if seen is None:
        return (name, role, address, pid, condition, restarts, "-", "-", "-", "-", "-")
    blocks = "-" if seen.used is None else f"{seen.used:.0f}/{seen.total or 0:.0f}"
    running, waiting = ("-" if number is None else f"{number:.0f}" for number in (seen.running, seen.waiting))
    links = ", ".join(map(_link, seen.links.values())) or "-"
    return (name, role, address, pid, condition, restarts, blocks, running, waiting, on_or_off(seen.digests), links)


def _link(link: LinkRow) -> str:
    if link.impossible:
        return f"NO LINK to {link.peer}: {link.impossible}"
    if not link.transport:
        return f"no link to {link.peer} yet"
    shown = f"{link.transport} to {link.peer} {'up' if link.up else 'down'}"
    if not link.passed_over:
        return shown
    failed = [text for text in link.passed_over if link.fallbacks and is_failure(text.partition(": ")[2])]
    others = [f"not {text}" for text in link.passed_over if text not in failed]
    reasons = "; ".join([f"fallback: {'; '.join(failed)}", *others] if failed else others)
    short = reasons if len(reasons) <= _MAX_REASON_CHARS else reasons[: _MAX_REASON_CHARS - 3] + "..."
    return f"{shown} ({short})"


def _scheduler_states(where: TargetCluster) -> dict[str, str]:
    """Return whether each of several schedulers is ready, by address; the shared port would reach any of them."""
    processes = () if where.state is None else where.state.processes
    schedulers = [one for one in processes if one.role == "scheduler" and one.alive]
    if len([one for one in processes if one.role == "scheduler"]) < 2:
        return {}
    base, states = where.base_url.rpartition(":")[0], {}
    for one in schedulers:
        try:
            reply = Client(f"{base}:{one.address.rpartition(':')[2]}", timeout_s=_TIMEOUT_S).get("/ready")
            states[one.address] = "ready" if reply.status == 200 else "not ready"
        except Unavailable:
            states[one.address] = "silent"
    return states


def _metric_samples(client: Client, where: TargetCluster) -> tuple[Sample, ...] | None:
    """Return the scheduler's metrics, None if it does not answer. Raises Unavailable if there is no run folder."""
    try:
        return client.metrics()
    except (Unavailable, UnicodeDecodeError) as error:
        if where.state is None:
            raise Unavailable(where.nothing_there) from error
        return None


def _instances(samples: tuple[Sample, ...] | None, where: TargetCluster) -> tuple[InstanceRow, ...]:
    """Return the instances on the page. Raises Unavailable for the page of another server."""
    if samples is None:
        return ()
    instances = read_page(samples)
    if not instances and where.state is None:
        raise Unavailable(f"the server at {where.base_url} is not a pdserve scheduler: its /metrics lists no instances")
    return instances


def _cluster_lines(samples: tuple[Sample, ...] | None, where: TargetCluster) -> Iterator[str]:
    """Yield the roles that are gone, the table in use, the supervisor and the spare."""
    for role, choice in read_roles_gone(samples or ()).items():
        yield f"{role} gone: {'the others serve alone' if choice == 'local' else 'requests fail'}"
    table = read_table(samples or ())
    if table is not None:
        yield f"table {table}"
    watcher = None if where.state is None else where.state.supervisor
    if watcher is not None:
        yield f"supervisor {watcher.pid}" if watcher.alive else "no supervisor: nothing is restarted"
    if where.state is not None and where.state.spare is not None:
        yield _spare(where.state.spare)


def _spare(spare: ProcessRecord) -> str:
    """Return the spare's pid, state and memory, or why there is no spare."""
    if not spare.alive:
        return f"no spare ({spare.note if spare.pid == 0 else 'gone'})"
    return f"spare {spare.pid} ({spare.note}, {resident_bytes(spare.pid) / 1e6:.0f} MB)"


def _reasons(client: Client) -> dict[str, str]:
    """Return, by address, the reasons that /ready gives for instances that are not living."""
    try:
        body = client.get("/ready").json()
    except Unavailable:
        return {}
    listed = body.get("instances") if isinstance(body, dict) else None
    found = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    return {str(one.get("address")): str(one.get("why") or "") for one in found}


def _model(client: Client, where: TargetCluster) -> str:
    if where.state is not None:
        return where.state.model
    try:
        return served_model(client)
    except Unavailable:
        return "?"
