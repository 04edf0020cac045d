"""A server's metrics, in the form of vLLM's get_metrics."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One series: its name and its labels."""

    name: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A value that only grows."""

    value: float


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A value that goes up and down."""

    value: float


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """Cumulative counts by upper bound, the total count, and the sum of the values."""

    count: int
    sum: float
    buckets: Mapping[str, int]


def read_metrics(page: str) -> list[Metric]:
    """Return the series of a page in Prometheus text format, in page order."""
    from prometheus_client.parser import text_string_to_metric_families

    return [metric for family in text_string_to_metric_families(page) for metric in _of_family(family)]


def _of_family(family: object) -> Iterator[Metric]:
    name, kind, samples = family.name, family.type, family.samples  # type: ignore[attr-defined]
    if kind == "histogram":
        yield from _make_histograms(name, samples)
        return
    for sample in samples:
        if not sample.name.endswith("_created"):
            yield (Counter if kind == "counter" else Gauge)(sample.name, dict(sample.labels), sample.value)


def _make_histograms(name: str, samples: list) -> Iterator[Histogram]:  # type: ignore[type-arg]
    found: dict[tuple[tuple[str, str], ...], dict[str, dict[str, float]]] = {}
    for sample in samples:
        labels = {key: value for key, value in sample.labels.items() if key != "le"}
        parts = found.setdefault(tuple(sorted(labels.items())), {"bucket": {}, "count": {}, "sum": {}})
        part = sample.name.removeprefix(f"{name}_")
        if part in parts:
            parts[part][sample.labels.get("le", "")] = sample.value
    for key, parts in found.items():
        buckets = {bound: int(count) for bound, count in parts["bucket"].items()}
        yield Histogram(name, dict(key), int(parts["count"].get("", 0)), parts["sum"].get("", 0.0), buckets)
