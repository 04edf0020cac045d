"""The scheduler's Prometheus metrics: the cluster's, and its own counters under pdserve's and vLLM's names."""

from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric

from scheduler.observability.cluster_metrics import ClusterCollector
from scheduler.observability.counters import SchedulerCounters
from scheduler.observability.replacements import ReplacementCollector
from scheduler.observability.vllm_metrics import VllmCollector
from scheduler.view import ClusterView
from telemetry.bucket_bounds import DEFAULT_MODEL_LEN
from telemetry.exposition import exposed
from telemetry.metric_families import Namespace, families
from telemetry.metric_table import OUTCOMES, REQUESTS, TRACES
from telemetry.span_exporter import SpanExporter

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


class Metrics:
    """Owner of the counters and of the registry that exposes them. `model_name` is the label of vLLM's metrics.

    `state_file` is that of `pdserve up`, if it started this scheduler.
    """

    def __init__(
        self, view: Callable[[], ClusterView] | None = None, *, model_name: str = "",
        max_model_len: int = DEFAULT_MODEL_LEN, exporter: SpanExporter | None = None,
        state_file: Path | None = None,
    ) -> None:  # fmt: skip
        self.counters = SchedulerCounters(max_model_len)
        self.view = view
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(PdserveCollector(self.counters, exporter))
        self._registry.register(VllmCollector(self.counters, view, model_name))
        self._registry.register(ReplacementCollector(state_file))
        if view is not None:
            self._registry.register(ClusterCollector(view))

    def http_request(self, route: str, method: str, status: int) -> None:
        """Count one HTTP request; `route` is one of the app's labels, never a client's path."""
        self.counters.http_request(route, method if method in _METHODS else "other", status)

    def render(self) -> bytes:
        """Return all metrics in the text format."""
        return exposed(self._registry.collect())


class PdserveCollector:
    """Exposes the counters under pdserve's names, and the counts of exported traces."""

    def __init__(self, counters: SchedulerCounters, exporter: SpanExporter | None = None) -> None:
        self._counters = counters
        self._exporter = exporter

    def describe(self) -> list[Metric]:
        """Return nothing: the names need no check at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        for rows, source in (
            (REQUESTS, self._counters), (TRACES, self._exporter or _NoExporter), (OUTCOMES, self._counters),
        ):  # fmt: skip
            yield from families(rows, Namespace.PDSERVE, [((), source)])


class _NoExporter:
    """The counts of exported traces when there is no exporter."""

    num_sent = num_dropped = 0
