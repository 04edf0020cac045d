"""Traces of requests: their spans are exported to a collector and continue the client's trace."""

import secrets
import time
from collections.abc import Callable, Iterable, Mapping

from scheduler.observability.counters import SchedulerCounters
from scheduler.observability.request_done import RequestDone
from scheduler.observability.trace_spans import spans_of
from scheduler.request import PromptDone
from telemetry.logs import EventLogger
from telemetry.otlp_endpoint import OtlpEndpoint, is_installed, read_endpoint
from telemetry.otlp_transport import open_transport
from telemetry.span_exporter import SpanExporter
from telemetry.spans import TraceContext, read_context
from wire.errors import ConfigError

_log = EventLogger("traces")


class Traces:
    """Owner of the exporter. `wall_ns` returns the nanoseconds since 1970."""

    def __init__(
        self, exporter: SpanExporter, *, model: str, wall_ns: Callable[[], int] = time.time_ns,
        new_id: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:  # fmt: skip
        self.exporter = exporter
        self._model, self._wall_ns, self._new_id = model, wall_ns, new_id

    def observer(self, counters: SchedulerCounters, headers: Iterable[tuple[bytes, bytes]]) -> "Traced":
        """Return the observer of one request: it updates the counters and continues the trace of the HTTP headers."""
        return Traced(counters, self, _trace_context(headers))

    def child_of(self, context: TraceContext | None) -> TraceContext:
        """Return the context of a request's own span, in the client's trace or a new one."""
        trace_id = self._new_id(16) if context is None else context.trace_id
        return TraceContext(trace_id, self._new_id(8), context is None or context.is_sampled)

    def export(self, done: RequestDone, context: TraceContext | None) -> None:
        """Queue the spans of a request that just finished; none if its client's trace is not sampled."""
        if context is not None and not context.is_sampled:
            return
        try:
            self.exporter.put(spans_of(done, self._wall_ns(), context, model=self._model, new_id=self._new_id))
        except Exception as error:  # noqa: BLE001 - a failing trace must not fail its request
            _log.error("trace_lost", error, request_id=done.request.request_id, error=error)

    def close(self) -> None:
        """Send the queued spans, for a short time at most, and close the exporter."""
        self.exporter.close()


class Traced:
    """The Observer of one request: its tokens go straight to the counters."""

    def __init__(self, counters: SchedulerCounters, traces: Traces, context: TraceContext | None) -> None:
        self.first_token_came = counters.first_token_came
        self.choice_started = counters.choice_started
        self.token_gap = counters.token_gap
        self._counters, self._traces, self._context = counters, traces, context

    def prompt_done(self, done: PromptDone) -> None:
        """Count a prompt whose hand-off is complete."""
        self._counters.prompt_done(done)

    def request_done(self, done: RequestDone) -> None:
        """Count the finished request and export its trace."""
        self._counters.request_done(done)
        self._traces.export(done, self._context)


def traceparent_of(traces: Traces | None, headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the `traceparent` for calls on behalf of a request with these HTTP headers; empty if nothing is traced."""
    context = _trace_context(headers)
    if traces is not None:
        context = traces.child_of(context)
    return "" if context is None else context.header


def check_traces(url: str | None, environ: Mapping[str, str]) -> OtlpEndpoint | None:
    """Return the endpoint of `--otlp-traces-endpoint`, None without one. Raises ConfigError for an invalid one."""
    if url is None:
        return None
    try:
        endpoint = read_endpoint(url, environ)
    except ValueError as error:
        raise ConfigError(f"--otlp-traces-endpoint: {error}") from error
    if not is_installed():
        raise ConfigError("--otlp-traces-endpoint needs opentelemetry-proto: pip install 'pdserve[otlp]'")
    return endpoint


def open_traces(url: str | None, environ: Mapping[str, str], *, model: str) -> Traces | None:
    """Start exporting to `url`; None without one. Raises ConfigError as `check_traces` does."""
    endpoint = check_traces(url, environ)
    if endpoint is None:
        return None
    from telemetry.otlp_messages import encode, rejected

    exporter = SpanExporter(open_transport(endpoint), lambda spans: encode(spans, endpoint.service_name), rejected)
    _log.info("trace_export_started", endpoint=endpoint)
    return Traces(exporter, model=model)


def _trace_context(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext | None:
    parents = [value.decode("latin-1") for name, value in headers if name == b"traceparent"]
    states = [value.decode("latin-1") for name, value in headers if name == b"tracestate"]
    return read_context(parents[0], ",".join(states)) if len(parents) == 1 else None
