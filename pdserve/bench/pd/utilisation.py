"""How busy each instance was and how long KV hops took, from two samples of the scheduler's metrics."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pdserve.client import Sample


@dataclass(frozen=True, slots=True)
class Counted:
    """The counters at one moment: step seconds by instance name, and the KV hops."""

    step_s: Mapping[str, float]
    hops: float
    hop_s: float
    hop_bytes: float


@dataclass(frozen=True, slots=True)
class Use:
    """Between two moments: each instance's share of time computing, and a hop's mean time and size."""

    busy: Mapping[str, float]
    hops: int
    hop_ms: float | None
    hop_bytes: float | None


def read_counters(samples: Iterable[Sample]) -> Counted:
    """Return the counters of a scheduler's metrics page."""
    names: dict[str, str] = {}
    seconds: dict[str, float] = {}
    totals: dict[str, float] = {}
    for sample in samples:
        if sample.name == "pdserve_instance_info":
            names[sample.labels["instance"]] = sample.labels["name"]
        elif sample.name == "pdserve_step_seconds_total":
            seconds[sample.labels["instance"]] = sample.value
        elif sample.name in ("pdserve_kv_hop_seconds_count", "pdserve_kv_hop_seconds_sum", "pdserve_kv_hop_bytes_sum"):
            totals[sample.name] = sample.value
    return Counted(
        {names.get(instance, instance): value for instance, value in sorted(seconds.items())},
        totals.get("pdserve_kv_hop_seconds_count", 0.0),
        totals.get("pdserve_kv_hop_seconds_sum", 0.0),
        totals.get("pdserve_kv_hop_bytes_sum", 0.0),
    )


def utilisation_between(before: Counted, after: Counted, wall_s: float) -> Use:
    """Return the use of the `wall_s` seconds between two counts."""
    busy = {
        name: (seconds - before.step_s.get(name, 0.0)) / wall_s if wall_s > 0 else 0.0
        for name, seconds in sorted(after.step_s.items())
    }
    hops = int(after.hops - before.hops)
    if not hops:
        return Use(busy, 0, None, None)
    return Use(busy, hops, 1000 * (after.hop_s - before.hop_s) / hops, (after.hop_bytes - before.hop_bytes) / hops)
