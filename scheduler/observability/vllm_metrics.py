"""The counters and the instances' loads under vLLM's names, types, labels and buckets, for tools that read those.

Metrics of the whole cluster have the label engine="cluster", those of one instance its index in the table.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from scheduler.observability.counters import SchedulerCounters
from scheduler.view import ClusterView, InstanceView
from telemetry.metric_families import Namespace, families
from telemetry.metric_table import CLUSTER as CLUSTER_ROWS
from telemetry.metric_table import OUTCOMES, REQUESTS
from wire.load import LOADS, STEP_TOKEN_BUCKETS, LoadSnapshot

CLUSTER = "cluster"
_LABELS = ("model_name", "engine")
_UNCOUNTED = frozenset(("/health", "/ready", "/ping", "/load", "/version", "/metrics"))
_BOUND_TEXTS = (*(f"{edge:.1f}" for edge in STEP_TOKEN_BUCKETS), "+Inf")


class VllmCollector:
    """Turns counters and a view into vLLM's metrics at every scrape."""

    def __init__(self, counters: SchedulerCounters, view: Callable[[], ClusterView] | None, model_name: str) -> None:
        self._counters = counters
        self._view = view
        self._model_name = model_name

    def describe(self) -> list[Metric]:
        """Return nothing: registering must not read the view."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        cluster = [(self._labels(CLUSTER), self._counters)]
        bounds = self._counters.token_bounds
        yield from families((*REQUESTS, *OUTCOMES), Namespace.VLLM, cluster, labels=_LABELS, model_tokens=bounds)
        yield _http_requests(self._counters.http)
        if self._view is not None:
            view = self._view()
            instances = _by_engine(view.instances)
            loads = [(self._labels(engine), load) for engine, _, load in instances]
            yield from self._waiting(view, instances)
            yield from families(CLUSTER_ROWS, Namespace.VLLM, [((self._model_name,), view)], labels=_LABELS[:1])
            yield from families(LOADS, Namespace.VLLM, loads, labels=_LABELS)
            yield self._iteration_tokens(instances)
            yield _cache_config(instances)

    def _waiting(
        self, view: ClusterView, instances: Sequence[tuple[str, InstanceView, LoadSnapshot]]
    ) -> Iterator[Metric]:
        """Yield the waiting prompts: the cluster's are in the scheduler's queue, an instance's are on the instance.

        All wait for room (`capacity`). One whose KV or images are on their way, `deferred` in vLLM, is not counted.
        """
        waiting = [(self._labels(CLUSTER), view.queued_prompts)]
        waiting += [(self._labels(engine), load.waiting) for engine, _, load in instances]
        name, reasons = "vllm:num_requests_waiting", (*_LABELS, "reason")
        whole = GaugeMetricFamily(name, "Prompts waiting", labels=_LABELS)
        parts = GaugeMetricFamily(f"{name}_by_reason", "Prompts waiting, by reason", labels=reasons)
        for labels, count in waiting:
            whole.add_metric(labels, count)
            parts.add_metric((*labels, "capacity"), count)
            parts.add_metric((*labels, "deferred"), 0)
        yield from (whole, parts)

    def _iteration_tokens(self, instances: Sequence[tuple[str, InstanceView, LoadSnapshot]]) -> Metric:
        """Return the instances' histograms; an instance that reports no counts is left out."""
        family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of a step", labels=_LABELS)
        for engine, _, load in instances:
            if len(load.step_tokens) == len(STEP_TOKEN_BUCKETS) + 1:
                buckets = [*zip(_BOUND_TEXTS, map(float, accumulate(load.step_tokens)), strict=True)]
                family.add_metric(self._labels(engine), buckets, load.tokens_computed)
        return family

    def _labels(self, engine: str) -> tuple[str, str]:
        return (self._model_name, engine)


def _by_engine(instances: Sequence[InstanceView]) -> list[tuple[str, InstanceView, LoadSnapshot]]:
    """Return the instances by engine label; the later of two with the same index, as samples must be unique."""
    living = {str(one.index): (one, one.load) for one in instances if one.load is not None}
    return [(engine, one, load) for engine, (one, load) in living.items()]


def _cache_config(instances: Sequence[tuple[str, InstanceView, LoadSnapshot]]) -> Metric:
    family = GaugeMetricFamily(
        "vllm:cache_config_info", "The KV pools; always 1",
        labels=(
            "block_size", "cache_dtype", "num_gpu_blocks", "engine", "kv_cache_size_tokens", "kv_cache_max_concurrency",
        ),
    )  # fmt: skip
    for engine, one, load in instances:
        if one.description is not None:
            about, num_tokens = one.description, load.blocks_total * one.description.block_size
            labels = (str(about.block_size), about.dtype, str(load.blocks_total), engine, str(num_tokens))
            family.add_metric((*labels, f"{num_tokens / about.max_model_len:.2f}"), 1)
    return family


def _http_requests(http: Counter[tuple[str, str, str]]) -> Metric:
    """Return vLLM's HTTP metric: statuses grouped as 2xx, 4xx and so on, without the monitoring routes."""
    grouped: Counter[tuple[str, str, str]] = Counter()
    for (route, method, status), count in http.items():
        if route not in _UNCOUNTED:
            grouped[route, method, f"{status[0]}xx"] += count
    family = CounterMetricFamily("http_requests", "HTTP requests answered", labels=("handler", "method", "status"))
    for labels, count in grouped.items():
        family.add_metric(labels, count)
    return family
