"""`pdserve status`: one line an instance, from the run folder and from what the scheduler says on /metrics."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.client import Client, Sample
from pdserve.readiness import ask
from pdserve.run_folder import ClusterState, RunFolder, default_run_dir
from wire.errors import Unavailable
from wire.options import Parser

_TIMEOUT_S = 3.0
_HEADER = ("NAME", "ROLE", "ADDRESS", "PID", "STATE", "KV BLOCKS", "RUNNING", "LINKS")


@dataclass(slots=True)
class Figures:
    """What /metrics says of one instance; figures it does not give are None."""

    state: str = ""
    used: float | None = None
    total: float | None = None
    running: float | None = None
    links: list[str] = field(default_factory=list)


def main(argv: Sequence[str]) -> int:
    """Run the command: 0 when the cluster is ready, 1 when it is not or nothing runs."""
    parser = Parser(prog="pdserve status", description="Show the instances of the running cluster.")
    parser.add_argument("--run-dir", default=str(default_run_dir(os.environ)), help="the folder `up` was given")
    folder = RunFolder(Path(parser.parse_args(argv).run_dir).absolute())
    state = folder.read()
    if state is None or not state.living():
        print(
            "no cluster of `pdserve up` runs here (start_servers.sh's are not listed): `pdserve up --detach` starts one"
        )
        return 1
    client = Client(state.base_url, timeout_s=_TIMEOUT_S)
    ready, words = ask(client)
    condition = "ready" if ready else f"not ready: {words or 'no answer'}"
    print(f"{state.base_url}  {condition}  model {state.model}")
    for line in table(state, figures(_samples(client))):
        print(line)
    return 0 if ready else 1


def table(state: ClusterState, by_address: Mapping[str, Figures]) -> list[str]:
    """Return the lines of the table, header first."""
    rows = [_HEADER]
    for process in state.processes:
        seen = by_address.get(process.address, Figures())
        condition = (seen.state or "running") if process.alive else "gone"
        blocks = "-" if seen.used is None else f"{seen.used:.0f}/{seen.total or 0:.0f}"
        running = "-" if seen.running is None else f"{seen.running:.0f}"
        links = ", ".join(seen.links) or "-"
        pid = str(process.pid)
        rows.append((process.name, process.role, process.address, pid, condition, blocks, running, links))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def figures(samples: Sequence[Sample]) -> dict[str, Figures]:
    """Return what a metrics page says of each instance, by its address."""
    by_id: dict[str, Figures] = {}
    id_by_address: dict[str, str] = {}
    for sample in samples:
        instance = sample.labels.get("instance")
        if instance is None:
            continue
        seen = by_id.setdefault(instance, Figures())
        match sample.name:
            case "pdserve_instance_info":
                id_by_address[sample.labels["address"]] = instance
                seen.state = sample.labels["state"]
            case "pdserve_kv_blocks_used":
                seen.used = sample.value
            case "pdserve_kv_blocks_total":
                seen.total = sample.value
            case "pdserve_running":
                seen.running = sample.value
            case "pdserve_link_up":
                seen.links.append(_link(sample))
    return {address: by_id[instance] for address, instance in id_by_address.items()}


def _link(sample: Sample) -> str:
    peer, transport = sample.labels.get("peer", "?"), sample.labels.get("transport", "?")
    return f"{transport} to {peer} {'up' if sample.value else 'down'}"


def _samples(client: Client) -> Sequence[Sample]:
    try:
        return client.metrics()
    except Unavailable:
        return ()
