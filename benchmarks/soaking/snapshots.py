"""Resources of a cluster during a soak: memory, descriptors and threads of each process; shared memory; gauges."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from pdserve.client import Client
from pdserve.run_folder import RunFolder

_SHARED = Path("/dev/shm")
# Zero when nothing runs, so a resource that a request did not release shows here.
IDLE = (
    "pdserve_requests_inflight", "pdserve_queued_prompts", "pdserve_queued_tokens", "pdserve_retries_inflight",
    "pdserve_retries_waiting", "pdserve_kv_blocks_used", "pdserve_kv_blocks_swapped", "pdserve_running",
    "pdserve_waiting", "pdserve_held_prompts", "pdserve_uncomputed_tokens",
)  # fmt: skip
_ENDED = ("completed", "failed", "cancelled")  # rejected requests do not count as received


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One process at one moment; `pid_and_start` differs between a process and its replacement.

    `resident_bytes` are without shared memory, and include the child processes, except those of the supervisor.
    """

    name: str
    pid_and_start: tuple[int, int]
    resident_bytes: int
    descriptors: int
    threads: int


def sample_processes(folder: RunFolder) -> list[ProcessSample]:
    """Return a snapshot of every living process of the cluster."""
    state, samples = folder.read(), []
    if state is None:
        return []
    for record in (*state.living(), *([state.supervisor] if state.supervisor else [])):
        try:
            process = psutil.Process(record.pid)
            with process.oneshot():
                family = [process, *process.children(recursive=True)] if record.name != "supervisor" else [process]
                resident = sum(one.memory_info().rss - one.memory_info().shared for one in family)
                samples.append(ProcessSample(
                    record.name, (record.pid, record.started), resident, process.num_fds(), process.num_threads(),
                ))  # fmt: skip
        except psutil.NoSuchProcess:
            continue
    return samples


def shared_names() -> set[str]:
    """Return the names in shared memory."""
    return {path.name for path in _SHARED.iterdir()} if _SHARED.is_dir() else set()


def not_idle(client: Client) -> dict[str, float]:
    """Return the gauges that should be zero now and are not, and the number of requests received and not ended."""
    counts: dict[str, float] = {}
    left: dict[str, float] = {}
    for sample in client.metrics():
        if sample.name in IDLE and sample.value:
            where = f"{sample.name}{sample.labels.get('instance', '')}"
            left[where] = sample.value
        counts[sample.name] = counts.get(sample.name, 0) + sample.value
    ended = sum(counts[f"pdserve_requests_{how}_total"] for how in _ENDED)
    if counts["pdserve_requests_received_total"] != ended:
        left["requests received and not ended"] = counts["pdserve_requests_received_total"] - ended
    return left


def all_living(client: Client, num_instances: int) -> bool:
    """Return whether the scheduler reports this many instances as living."""
    infos = [sample for sample in client.metrics() if sample.name == "pdserve_instance_info" and sample.value]
    return sum(info.labels["state"] == "living" for info in infos) == num_instances


def growth(samples: Sequence[ProcessSample]) -> dict[str, int]:
    """Return the growth of one process from the second quarter of its snapshots to the last: medians."""
    quarter = max(1, len(samples) // 4)
    early, late = samples[quarter : 2 * quarter] or samples[:1], samples[-quarter:]
    return {
        what: round(statistics.median(getattr(one, what) for one in late))
        - round(statistics.median(getattr(one, what) for one in early))
        for what in ("resident_bytes", "descriptors", "threads")
    }
