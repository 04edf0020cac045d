"""The counters and the instances' loads under vLLM's names, types, labels and buckets, for tools that read those.

Metrics of the whole cluster have the label engine="cluster", those of one instance its index in the table.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from scheduler.observability import bucket_bounds
from scheduler.observability.counters import SchedulerCounters
from scheduler.view import ClusterView, InstanceView
from telemetry.histogram import BucketHistogram
from wire.types import STEP_TOKEN_EDGES, LoadSnapshot

CLUSTER = "cluster"
REASONS = ("stop", "length", "abort", "error", "repetition")
_LABELS = ("model_name", "engine")
_UNCOUNTED = frozenset(("/health", "/ready", "/ping", "/load", "/version", "/metrics"))
_EDGE_TEXTS = (*(f"{edge:.1f}" for edge in STEP_TOKEN_EDGES), "+Inf")

_GAUGES: tuple[tuple[str, str, Callable[[LoadSnapshot], float]], ...] = (
    ("num_requests_running", "Sequences in the instance's batch", lambda load: load.running),
    ("kv_cache_usage_perc", "Share of the KV pool in use; 1 is all", lambda load: _share_used(load)),
)
_COUNTERS: tuple[tuple[str, str, Callable[[LoadSnapshot], float]], ...] = (
    ("prefix_cache_queries", "Tokens looked up in the prefix cache", lambda load: load.prefix_tokens_sought),
    ("prefix_cache_hits", "Tokens found in the prefix cache", lambda load: load.prefix_tokens_found),
    ("num_preemptions", "Prompts preempted for lack of blocks", lambda load: load.preemptions),
)


class VllmCollector:
    """Turns counters and a view into vLLM's metrics at every scrape."""

    def __init__(self, figures: SchedulerCounters, view: Callable[[], ClusterView] | None, model_name: str) -> None:
        self._figures = figures
        self._view = view
        self._model_name = model_name

    def describe(self) -> list[Metric]:
        """Return nothing: registering must not read the view."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        yield from self._histograms()
        yield from self._counters()
        yield _http_requests(self._figures.http)
        if self._view is not None:
            view = self._view()
            instances = _by_engine(view.instances)
            yield self._waiting(view, instances)
            yield from self._loads(instances)
            yield self._iterations(instances)
            yield _cache_config(instances)

    def _histograms(self) -> Iterator[Metric]:
        own, tokens = self._figures, self._figures.token_edges
        shown: tuple[tuple[str, str, BucketHistogram, Sequence[float]], ...] = (
            ("time_to_first_token_seconds", "Time to first token", own.first_token, bucket_bounds.VLLM_FIRST_TOKEN),
            (
                "inter_token_latency_seconds",
                "Time between two tokens of a choice",
                own.between_tokens,
                bucket_bounds.VLLM_STEP,
            ),
            (
                "request_time_per_output_token_seconds",
                "Mean time between two tokens of a request",
                own.mean_between,
                bucket_bounds.VLLM_STEP,
            ),
            ("e2e_request_latency_seconds", "Time from arrival to end", own.whole, bucket_bounds.VLLM_REQUEST),
            ("request_queue_time_seconds", "Time in the scheduler's queue", own.queue, bucket_bounds.VLLM_REQUEST),
            (
                "request_inference_time_seconds",
                "Time from placement to the last token",
                own.inference,
                bucket_bounds.VLLM_REQUEST,
            ),
            (
                "request_prefill_time_seconds",
                "Time from placement to the first token",
                own.prefill,
                bucket_bounds.VLLM_REQUEST,
            ),
            ("request_decode_time_seconds", "Time from first to last token", own.decode, bucket_bounds.VLLM_REQUEST),
            ("request_prompt_tokens", "Prompt tokens of a request", own.request_prompt_tokens, tokens),
            ("request_prefill_kv_computed_tokens", "Prompt tokens not cached", own.request_computed_tokens, tokens),
            ("request_generation_tokens", "Output tokens of a request", own.request_output_tokens, tokens),
            ("request_params_max_tokens", "The max_tokens of a request", own.max_tokens, tokens),
            ("request_params_n", "The n of a request", own.n, bucket_bounds.VLLM_N),
        )
        for name, help, histogram, shown_edges in shown:
            family = HistogramMetricFamily(f"vllm:{name}", help, labels=_LABELS)
            family.add_metric(self._labels(CLUSTER), histogram.buckets(shown_edges), histogram.sum)
            yield family

    def _counters(self) -> Iterator[Metric]:
        own = self._figures
        for name, help, value in (
            ("prompt_tokens", "Prompt tokens", own.prompt_tokens),
            ("generation_tokens", "Output tokens", own.output_tokens),
        ):
            family = CounterMetricFamily(f"vllm:{name}", help, labels=_LABELS)
            family.add_metric(self._labels(CLUSTER), value)
            yield family
        success = CounterMetricFamily(
            "vllm:request_success", "Finished sequences", labels=(*_LABELS, "finished_reason")
        )
        for reason in REASONS:
            success.add_metric((*self._labels(CLUSTER), reason), own.reasons[reason])
        yield success

    def _waiting(self, view: ClusterView, instances: Sequence[tuple[str, InstanceView, LoadSnapshot]]) -> Metric:
        """Return the waiting prompts: the cluster's are in the scheduler's queue, an instance's wait there."""
        family = GaugeMetricFamily("vllm:num_requests_waiting", "Prompts waiting", labels=_LABELS)
        family.add_metric(self._labels(CLUSTER), view.queued_prompts)
        for engine, _, load in instances:
            family.add_metric(self._labels(engine), load.waiting)
        return family

    def _loads(self, instances: Sequence[tuple[str, InstanceView, LoadSnapshot]]) -> Iterator[Metric]:
        for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, help, value in table:
                family = kind(f"vllm:{name}", help, labels=_LABELS)
                for engine, _, load in instances:
                    family.add_metric(self._labels(engine), value(load))
                yield family

    def _iterations(self, instances: Sequence[tuple[str, InstanceView, LoadSnapshot]]) -> Metric:
        """Return the instances' histograms; an instance that reports no counts is left out."""
        family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of a step", labels=_LABELS)
        for engine, _, load in instances:
            if len(load.step_tokens) == len(STEP_TOKEN_EDGES) + 1:
                buckets = [*zip(_EDGE_TEXTS, map(float, accumulate(load.step_tokens)), strict=True)]
                family.add_metric(self._labels(engine), buckets, load.tokens_computed)
        return family

    def _labels(self, engine: str) -> tuple[str, str]:
        return (self._model_name, engine)


def _by_engine(instances: Sequence[InstanceView]) -> list[tuple[str, InstanceView, LoadSnapshot]]:
    """Return the instances by engine label; of two with one index the later counts, as samples must be unique."""
    living = {str(one.index): (one, one.load) for one in instances if one.load is not None}
    return [(engine, one, load) for engine, (one, load) in living.items()]


def _cache_config(instances: Sequence[tuple[str, InstanceView, LoadSnapshot]]) -> Metric:
    family = GaugeMetricFamily(
        "vllm:cache_config_info", "The KV pools; always 1",
        labels=("block_size", "cache_dtype", "num_gpu_blocks", "engine"),
    )  # fmt: skip
    for engine, one, load in instances:
        if one.description is not None:
            labels = (str(one.description.block_size), one.description.dtype, str(load.blocks_total), engine)
            family.add_metric(labels, 1)
    return family


def _http_requests(http: Counter[tuple[str, str, str]]) -> Metric:
    """Return vLLM's HTTP metric: statuses as 2xx, without the monitoring routes."""
    grouped: Counter[tuple[str, str, str]] = Counter()
    for (route, method, status), count in http.items():
        if route not in _UNCOUNTED:
            grouped[route, method, f"{status[0]}xx"] += count
    family = CounterMetricFamily("http_requests", "HTTP requests answered", labels=("handler", "method", "status"))
    for labels, count in grouped.items():
        family.add_metric(labels, count)
    return family


def _share_used(load: LoadSnapshot) -> float:
    return (load.blocks_used - load.blocks_probe) / load.blocks_total if load.blocks_total else 0.0
