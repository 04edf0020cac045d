"""The scheduler's Prometheus metrics: the cluster's, and its own counters under pdserve's and vLLM's names."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from scheduler.observability import bucket_bounds
from scheduler.observability.cluster_metrics import ClusterCollector
from scheduler.observability.counters import SchedulerCounters
from scheduler.observability.replacements import ReplacementCollector
from scheduler.observability.vllm_metrics import VllmCollector
from scheduler.view import ClusterView
from telemetry.exposition import exposed
from telemetry.histogram import BucketHistogram
from telemetry.span_exporter import SpanExporter

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


class Metrics:
    """Owner of the counters and of the registry that exposes them. `model_name` is the label of vLLM's metrics.

    `state_file` is that of `pdserve up`, if it started this scheduler.
    """

    def __init__(
        self, view: Callable[[], ClusterView] | None = None, *, model_name: str = "",
        max_model_len: int = bucket_bounds.DEFAULT_MODEL_LEN, exporter: SpanExporter | None = None,
        state_file: Path | None = None,
    ) -> None:  # fmt: skip
        self.figures = SchedulerCounters(max_model_len)
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(FiguresCollector(self.figures, exporter))
        self._registry.register(VllmCollector(self.figures, view, model_name))
        self._registry.register(ReplacementCollector(state_file))
        if view is not None:
            self._registry.register(ClusterCollector(view))

    def http_request(self, route: str, method: str, status: int) -> None:
        """Count one HTTP request; `route` is one of the app's labels, never a client's path."""
        self.figures.http_request(route, method if method in _METHODS else "other", status)

    def render(self) -> bytes:
        """Return all metrics in the text format."""
        return exposed(self._registry.collect())


class FiguresCollector:
    """Exposes the counters under pdserve's names, and the counts of exported traces."""

    def __init__(self, figures: SchedulerCounters, exporter: SpanExporter | None = None) -> None:
        self._figures = figures
        self._exporter = exporter

    def describe(self) -> list[Metric]:
        """Return nothing: the names need no check at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        yield from self._histograms()
        yield self._stages()
        yield from self._counters()

    def _histograms(self) -> Iterator[Metric]:
        own = self._figures
        shown: tuple[tuple[str, str, BucketHistogram, Sequence[float]], ...] = (
            ("time_to_first_token_seconds", "From arrival to the first token", own.first_token, bucket_bounds.SECONDS),
            ("inter_token_latency_seconds", "Time between two tokens of a choice", own.between_tokens,
             bucket_bounds.STEP_SECONDS),
            ("e2e_request_latency_seconds", "From a request's arrival to its end", own.whole, bucket_bounds.SECONDS),
            ("request_prompt_tokens", "Prompt tokens of a request", own.request_prompt_tokens, bucket_bounds.TOKENS),
            ("request_generation_tokens", "Output tokens of a request", own.request_output_tokens,
             bucket_bounds.TOKENS),
            ("kv_hop_seconds", "From the end of prefill to the ack of decode", own.hop, bucket_bounds.HOP_SECONDS),
            ("kv_hop_bytes", "Bytes of a prompt's KV from prefill to decode", own.hop_bytes, bucket_bounds.BYTES),
            ("kv_overlap_ratio", "Share of a prompt's KV sent before it was fully computed", own.overlap,
             bucket_bounds.SHARES),
        )  # fmt: skip
        for name, help, histogram, shown_edges in shown:
            family = HistogramMetricFamily(f"pdserve_{name}", help)
            family.add_metric((), histogram.buckets(shown_edges), histogram.sum)
            yield family

    def _stages(self) -> Metric:
        family = HistogramMetricFamily(
            "pdserve_stage_seconds", "A prompt's stages, each measured where it runs", labels=("stage",)
        )
        for stage, histogram in self._figures.stages.items():
            family.add_metric((stage,), histogram.buckets(), histogram.sum)
        return family

    def _counters(self) -> Iterator[Metric]:
        own, exporter = self._figures, self._exporter
        for name, help, value in (
            ("prompt_tokens", "Prompt tokens of requests that got a first token", own.prompt_tokens),
            ("generation_tokens", "Output tokens", own.output_tokens),
            ("kv_handoff_bytes", "KV bytes of finished hand-offs", own.kv_bytes),
            ("kv_handoff_early_bytes", "KV bytes sent while their prompt was being computed", own.kv_bytes_early),
            ("trace_spans_sent", "Spans accepted by the collector", exporter.num_sent if exporter else 0),
            ("trace_spans_dropped", "Spans not accepted by the collector", exporter.num_dropped if exporter else 0),
        ):
            yield CounterMetricFamily(f"pdserve_{name}", help, value=value)
        http = CounterMetricFamily(
            "pdserve_http_requests", "HTTP requests answered", labels=("route", "method", "status")
        )
        for labels, count in own.http.items():
            http.add_metric(labels, count)
        endings = CounterMetricFamily("pdserve_request_endings", "How generation requests ended", labels=("ending",))
        for ending, count in own.endings.items():
            endings.add_metric((ending,), count)
        yield from (http, endings)
