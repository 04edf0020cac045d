"""The metrics of the scheduler and of instances: one row each, with its name and help in every namespace that has it.

`source` is the attribute with the value: of ClusterView (CLUSTER), SchedulerCounters (REQUESTS, OUTCOMES), the exporter
of spans (TRACES) or LinkMetrics (LINKS, GAPS). Rows are in the order of the pages; metric_families.py turns them into
Prometheus families. The rows of an instance's load (LOADS) are declared at the fields of LoadSnapshot (wire/load.py),
and metrics with a structure of their own next to their collectors in scheduler/observability/: vLLM's queue, steps,
cache and HTTP requests, and replacements.
"""

from dataclasses import dataclass
from enum import Enum

from telemetry.bucket_bounds import (
    BYTES,
    HOP_SECONDS,
    SECONDS,
    SHARES,
    STEP_SECONDS,
    TOKENS,
    VLLM_FIRST_TOKEN,
    VLLM_N,
    VLLM_PREEMPTIONS,
    VLLM_REQUEST,
    VLLM_STEP,
)


class MetricKind(Enum):
    """Prometheus' types."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Exposed:
    """A metric in one namespace: name without prefix, help, and a histogram's bucket boundaries.

    `buckets` None: vLLM's for token counts, which end at the model's maximum length.
    """

    name: str
    help: str
    buckets: tuple[float, ...] | None = ()


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric. `pdserve` and `vllm` are the scheduler's namespaces, `instance` that of an instance's own page.

    With `labels`, the source is a mapping from label values to values.
    """

    kind: MetricKind
    source: str
    pdserve: Exposed | None = None
    vllm: Exposed | None = None
    instance: Exposed | None = None
    labels: tuple[str, ...] = ()


_GAUGE, _COUNTER, _HISTOGRAM = MetricKind


def _row(
    kind: MetricKind, source: str, name: str, help: str, buckets: tuple[float, ...] = (), *,
    vllm: Exposed | None = None, labels: tuple[str, ...] = (),
) -> MetricRow:  # fmt: skip
    return MetricRow(kind, source, Exposed(name, help, buckets), vllm, labels=labels)


def _vllm(
    kind: MetricKind, source: str, name: str, help: str, buckets: tuple[float, ...] | None = (), *,
    labels: tuple[str, ...] = (),
) -> MetricRow:  # fmt: skip
    """Return the row of a metric that only vLLM's namespace has."""
    return MetricRow(kind, source, vllm=Exposed(name, help, buckets), labels=labels)


CLUSTER = (
    _row(_COUNTER, "ledger.received", "requests_received", "Requests accepted"),
    _row(_COUNTER, "ledger.completed", "requests_completed", "Requests that finished"),
    _row(_COUNTER, "ledger.failed", "requests_failed", "Requests that failed"),
    _row(_COUNTER, "ledger.cancelled", "requests_cancelled", "Requests cancelled because the client disconnected"),
    _row(_COUNTER, "ledger.rejected", "requests_rejected", "Requests never accepted"),
    _vllm(
        _COUNTER, "ledger.rejections", "admission_rejections", "Requests over a limit of the queue",
        labels=("reason",),
    ),
    _row(_COUNTER, "ledger.retried_prompts", "prompts_retried", "Retries of prompts"),
    _row(
        _COUNTER, "ledger.retried_tokens", "tokens_retried", "Tokens of prompts tried again and of their outputs",
    ),
    _row(
        _COUNTER, "ledger.differing_outputs", "outputs_differing",
        "Outputs that were generated again and differed from what was sent before",
    ),
    _row(_COUNTER, "ledger.delayed_retries", "retries_delayed", "Retries delayed by the retry budget"),
    _row(
        _COUNTER, "ledger.run_again", "requests_run_again",
        "Requests with an Idempotency-Key that ran a second time, as far as this scheduler can see",
    ),
    _row(
        _COUNTER, "ledger.served_without", "prompts_served_without_role",
        "Prompts that an instance served alone because no instance of the role was living", labels=("role",),
    ),
    _row(_GAUGE, "ledger.inflight", "requests_inflight", "Requests accepted and not finished"),
    _row(_GAUGE, "queued_prompts", "queued_prompts", "Prompts waiting in the scheduler"),
    _row(_GAUGE, "queued_tokens", "queued_tokens", "Prompt tokens waiting in the scheduler"),
    _row(_GAUGE, "retries.under_way", "retries_inflight", "Retries running against the retry budget"),
    _row(_GAUGE, "retries.waiting", "retries_waiting", "Retries waiting for the retry budget"),
    _row(_GAUGE, "retries.limit", "retries_limit", "Current limit of concurrent retries"),
    _row(_GAUGE, "ready", "ready", "1 if a request would be served now"),
    _row(
        _GAUGE, "role_gone", "role_gone", "1 while no instance of the role is living", labels=("role", "when_gone"),
    ),
    _row(_GAUGE, "table_versions", "table_version", "The global table in use", labels=("digest",)),
    _row(_GAUGE, "table_agrees", "table_agrees", "1 if the instance uses the current table", labels=("instance",)),
    _row(
        _GAUGE, "instance_info", "instance_info", "Instances of the table",
        labels=("instance", "name", "role", "address", "state", "kv_digests", "engine"),
    ),
)  # fmt: skip
REQUESTS = (
    _row(
        _HISTOGRAM, "first_token", "time_to_first_token_seconds", "From arrival to the first token", SECONDS,
        vllm=Exposed("time_to_first_token_seconds", "Time to first token", VLLM_FIRST_TOKEN),
    ),
    _row(
        _HISTOGRAM, "between_tokens", "inter_token_latency_seconds", "Time between two tokens of a choice",
        STEP_SECONDS, vllm=Exposed("inter_token_latency_seconds", "Time between two tokens of a choice", VLLM_STEP),
    ),
    _vllm(
        _HISTOGRAM, "mean_between", "request_time_per_output_token_seconds",
        "Mean time between two tokens of a request", VLLM_STEP,
    ),
    _row(
        _HISTOGRAM, "whole", "e2e_request_latency_seconds", "From a request's arrival to its end", SECONDS,
        vllm=Exposed("e2e_request_latency_seconds", "Time from arrival to end", VLLM_REQUEST),
    ),
    _vllm(_HISTOGRAM, "queue", "request_queue_time_seconds", "Time in the scheduler's queue", VLLM_REQUEST),
    _vllm(
        _HISTOGRAM, "inference", "request_inference_time_seconds", "Time from placement to the last token",
        VLLM_REQUEST,
    ),
    _vllm(
        _HISTOGRAM, "prefill", "request_prefill_time_seconds", "Time from placement to the first token", VLLM_REQUEST,
    ),
    _vllm(_HISTOGRAM, "decode", "request_decode_time_seconds", "Time from first to last token", VLLM_REQUEST),
    _row(
        _HISTOGRAM, "request_prompt_tokens", "request_prompt_tokens", "Prompt tokens of a request", TOKENS,
        vllm=Exposed("request_prompt_tokens", "Prompt tokens of a request", None),
    ),
    _vllm(
        _HISTOGRAM, "request_computed_tokens", "request_prefill_kv_computed_tokens", "Prompt tokens not cached", None,
    ),
    _row(
        _HISTOGRAM, "request_output_tokens", "request_generation_tokens", "Output tokens of a request", TOKENS,
        vllm=Exposed("request_generation_tokens", "Output tokens of a request", None),
    ),
    _vllm(
        _HISTOGRAM, "preemptions", "request_num_preemptions", "Times that a request was preempted between two tokens",
        VLLM_PREEMPTIONS,
    ),
    _vllm(_HISTOGRAM, "max_tokens", "request_params_max_tokens", "The max_tokens of a request", None),
    _vllm(_HISTOGRAM, "n", "request_params_n", "The n of a request", VLLM_N),
    _row(_HISTOGRAM, "hop", "kv_hop_seconds", "From the end of prefill to the ack of decode", HOP_SECONDS),
    _row(_HISTOGRAM, "hop_bytes", "kv_hop_bytes", "Bytes of a prompt's KV from prefill to decode", BYTES),
    _row(_HISTOGRAM, "overlap", "kv_overlap_ratio", "Share of a prompt's KV sent before it was fully computed", SHARES),
    _row(
        _HISTOGRAM, "stages", "stage_seconds", "A prompt's stages, each measured where it runs", HOP_SECONDS,
        labels=("stage",),
    ),
    _row(
        _COUNTER, "prompt_tokens", "prompt_tokens", "Prompt tokens of requests that got a first token",
        vllm=Exposed("prompt_tokens", "Prompt tokens"),
    ),
    _row(
        _COUNTER, "output_tokens", "generation_tokens", "Output tokens",
        vllm=Exposed("generation_tokens", "Output tokens"),
    ),
    _row(_COUNTER, "kv_bytes", "kv_handoff_bytes", "KV bytes of finished hand-offs"),
    _row(_COUNTER, "kv_bytes_early", "kv_handoff_early_bytes", "KV bytes sent while their prompt was being computed"),
)  # fmt: skip
TRACES = (
    _row(_COUNTER, "num_sent", "trace_spans_sent", "Spans accepted by the collector"),
    _row(_COUNTER, "num_dropped", "trace_spans_dropped", "Spans not accepted by the collector"),
)  # fmt: skip
OUTCOMES = (
    _row(_COUNTER, "http", "http_requests", "HTTP requests answered", labels=("route", "method", "status")),
    _row(_COUNTER, "paths", "prompts_served", "Prompts served", labels=("path",)),
    _row(_COUNTER, "path_seconds", "path_seconds", "Seconds of prompts whose paths were compared", labels=("path",)),
    _row(_COUNTER, "path_expected", "path_expected_seconds", "Seconds expected for these prompts", labels=("path",)),
    _row(_COUNTER, "outcomes", "request_endings", "How generation requests ended", labels=("ending",)),
    _vllm(_COUNTER, "finished_reasons", "request_success", "Finished sequences", labels=("finished_reason",)),
)  # fmt: skip
_PAIR = ("instance", "peer")
_OVER = (*_PAIR, "transport")
LINKS = (
    _row(_GAUGE, "up", "link_up", "1 if the link is usable", labels=_OVER),
    _row(
        _GAUGE, "round_trip_s", "link_round_trip_seconds", "Shortest round trip of the link's last measurement",
        labels=_OVER,
    ),
    _row(
        _GAUGE, "bytes_per_s", "link_bandwidth_bytes_per_second", "Bandwidth of the link's last measurement",
        labels=_OVER,
    ),
    _row(_COUNTER, "failures", "link_failures", "Links to the peer that were lost", labels=_PAIR),
    _row(
        _COUNTER, "fallbacks", "link_fallbacks", "Times that a worse transport had to be used towards the peer",
        labels=_PAIR,
    ),
    _row(
        _GAUGE, "passed_over", "link_passed_over", "A better transport that is not in use now, and why",
        labels=(*_OVER, "reason"),
    ),
)  # fmt: skip
GAPS = (
    _row(
        _GAUGE, "impossible", "link_impossible", "1 for a pair without a common KV transport, and why",
        labels=(*_PAIR, "reason"),
    ),
)  # fmt: skip
