"""The scheduler's Prometheus metrics: the cluster's, and histograms fed while requests run."""

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from scheduler.cluster_metrics import ClusterCollector
from scheduler.request import PromptDone
from scheduler.view import ClusterView

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_HOP_SECONDS = (0.0005, 0.001, 0.0025, *_SECONDS)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_BYTES = tuple(4**power * 1024 for power in range(13))
_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1)
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


class Metrics:
    """Owns one registry. It is the Observer of text streams."""

    def __init__(self, view: Callable[[], ClusterView] | None = None) -> None:
        self._registry = CollectorRegistry()
        if view is not None:
            self._registry.register(ClusterCollector(view))
        self._first = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token", _SECONDS
        )
        self._between = self._histogram("inter_token_latency_seconds", "Between two tokens of a choice", _STEP_SECONDS)
        self._whole = self._histogram("e2e_request_latency_seconds", "From a request's arrival to its end", _SECONDS)
        self._prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._output_tokens = self._histogram("request_generation_tokens", "Output tokens of a request", _TOKENS)
        self._hop_s = self._histogram(
            "kv_hop_seconds", "The tail of a hand-off: from the prompt computed to decode's ack", _HOP_SECONDS
        )
        self._hop_bytes = self._histogram("kv_hop_bytes", "Bytes of a prompt's KV from prefill to decode", _BYTES)
        self._overlap = self._histogram(
            "kv_overlap_ratio", "Share of a prompt's KV that left while the prompt was computed", _SHARES
        )
        self._bytes = self._counter("kv_handoff_bytes", "KV bytes of finished hand-offs")
        self._early_bytes = self._counter("kv_handoff_early_bytes", "Those that left while their prompt was computed")
        self._http = Counter(
            "pdserve_http_requests", "HTTP requests answered", ("route", "method", "status"), registry=self._registry
        )
        self._endings = Counter(
            "pdserve_request_endings", "How generation requests ended", ("ending",), registry=self._registry
        )

    def token(self, started_s: float, previous_s: float | None, now_s: float, *, first: bool) -> None:
        """Count one token's latency."""
        if first:
            self._first.observe(now_s - started_s)
        if previous_s is not None:
            self._between.observe(now_s - previous_s)

    def prompt_done(self, done: PromptDone) -> None:
        """Count one prompt's hop, if it made one."""
        if done.times.send_s is not None and done.times.kv_bytes:
            self._hop_s.observe(done.times.send_s)
            self._hop_bytes.observe(done.times.kv_bytes)
            self._overlap.observe(done.times.kv_bytes_early / done.times.kv_bytes)
            self._bytes.inc(done.times.kv_bytes)
            self._early_bytes.inc(done.times.kv_bytes_early)

    def request_done(self, num_prompt_tokens: int, num_output_tokens: int, seconds: float, ending: str) -> None:
        """Count one request's ending; its sizes only if it finished."""
        self._endings.labels(ending).inc()
        if ending == "finished":
            self._whole.observe(seconds)
            self._prompt_tokens.observe(num_prompt_tokens)
            self._output_tokens.observe(num_output_tokens)

    def http_request(self, route: str, method: str, status: int) -> None:
        """Count one HTTP request; `route` is one of the app's own, never what a client typed."""
        self._http.labels(route, method if method in _METHODS else "other", str(status)).inc()

    def render(self) -> bytes:
        """Return everything in the text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(f"pdserve_{name}", help, registry=self._registry)

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"pdserve_{name}", help, registry=self._registry, buckets=buckets)
