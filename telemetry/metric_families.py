"""Prometheus families from rows of the metric table (metric_table.py)."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from operator import attrgetter
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from telemetry.histogram import BucketHistogram
from telemetry.metric_table import MetricKind, MetricRow

_FAMILIES: Mapping[MetricKind, Callable[..., Any]] = {
    MetricKind.GAUGE: GaugeMetricFamily,
    MetricKind.COUNTER: CounterMetricFamily,
    MetricKind.HISTOGRAM: HistogramMetricFamily,
}


class Namespace(Enum):
    """A namespace of metrics. Its value is the prefix; a row's attribute of the same name is the row's metric there."""

    PDSERVE = "pdserve_"
    VLLM = "vllm:"
    INSTANCE = "pdserve_instance_"


def families(
    rows: Iterable[MetricRow], namespace: Namespace, sources: Sequence[tuple[tuple[str, ...], Any]], *,
    labels: tuple[str, ...] = (), model_tokens: Sequence[float] = (),
) -> Iterator[Metric]:  # fmt: skip
    """Yield the family of each row that the namespace has, with a sample for each (values of `labels`, source).

    `model_tokens` are the bucket boundaries of rows without their own.
    """
    for row in rows:
        shown = getattr(row, namespace.name.lower())
        if shown is None:
            continue
        kind = MetricKind.GAUGE if namespace is Namespace.INSTANCE else row.kind
        family = _FAMILIES[kind](namespace.value + shown.name, shown.help, labels=(*labels, *row.labels))
        value_of = attrgetter(row.source)
        for values, source in sources:
            value = value_of(source)
            for own, part in value.items() if row.labels else (((), value),):
                key = (*values, own) if isinstance(own, str) else (*values, *own)
                if isinstance(part, BucketHistogram):
                    buckets = part.buckets(model_tokens if shown.buckets is None else shown.buckets)
                    family.add_metric(key, buckets, part.sum)
                else:
                    family.add_metric(key, part)
        yield family
