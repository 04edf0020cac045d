"""The metrics of the scheduler and of instances: one row each, with its name and help in every namespace that has it.

`source` is the attribute with the value: of ClusterView (CLUSTER), SchedulerCounters (REQUESTS, OUTCOMES), the exporter
of spans (TRACES) or LoadSnapshot (LOADS). Rows are in the order of the pages; metric_families.py turns them into
Prometheus families. Metrics with a structure of their own stand with their collectors in scheduler/observability/
(instances and their table, vLLM's queue, steps and cache, replacements) and in scheduler/links/metrics.py.
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

    `buckets` None: vLLM's for token counts, which end at the model's length.
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


def _load(kind: MetricKind, field: str, name: str, help: str, vllm: Exposed | None = None) -> MetricRow:
    """Return the row of a field of LoadSnapshot."""
    return MetricRow(kind, field, Exposed(name, help), vllm, Exposed(field, help))


def _times(source: str, name: str, help: str, buckets: tuple[float, ...]) -> MetricRow:
    """Return the row of a histogram that only vLLM's namespace has."""
    return MetricRow(_HISTOGRAM, source, vllm=Exposed(name, help, buckets))


CLUSTER = (
    MetricRow(_COUNTER, "ledger.received", Exposed("requests_received", "Requests accepted")),
    MetricRow(_COUNTER, "ledger.completed", Exposed("requests_completed", "Requests that finished")),
    MetricRow(_COUNTER, "ledger.failed", Exposed("requests_failed", "Requests that failed")),
    MetricRow(
        _COUNTER,
        "ledger.cancelled",
        Exposed("requests_cancelled", "Requests cancelled because the client disconnected"),
    ),
    MetricRow(_COUNTER, "ledger.rejected", Exposed("requests_rejected", "Requests never accepted")),
    MetricRow(_COUNTER, "ledger.retried_prompts", Exposed("prompts_retried", "Prompts tried a second time")),
    MetricRow(_COUNTER, "ledger.delayed_retries", Exposed("retries_delayed", "Retries delayed by the retry budget")),
    MetricRow(_GAUGE, "ledger.inflight", Exposed("requests_inflight", "Requests accepted and not finished")),
    MetricRow(_GAUGE, "queued_prompts", Exposed("queued_prompts", "Prompts waiting in the scheduler")),
    MetricRow(_GAUGE, "queued_tokens", Exposed("queued_tokens", "Prompt tokens waiting in the scheduler")),
    MetricRow(_GAUGE, "retries.under_way", Exposed("retries_inflight", "Retries running against the retry budget")),
    MetricRow(_GAUGE, "retries.waiting", Exposed("retries_waiting", "Retries waiting for the retry budget")),
    MetricRow(_GAUGE, "retries.limit", Exposed("retries_limit", "Current limit of concurrent retries")),
    MetricRow(_GAUGE, "ready", Exposed("ready", "1 if a request would be served now")),
)
REQUESTS = (
    MetricRow(
        _HISTOGRAM, "first_token",
        Exposed("time_to_first_token_seconds", "From arrival to the first token", SECONDS),
        Exposed("time_to_first_token_seconds", "Time to first token", VLLM_FIRST_TOKEN),
    ),
    MetricRow(
        _HISTOGRAM, "between_tokens",
        Exposed("inter_token_latency_seconds", "Time between two tokens of a choice", STEP_SECONDS),
        Exposed("inter_token_latency_seconds", "Time between two tokens of a choice", VLLM_STEP),
    ),
    _times("mean_between", "request_time_per_output_token_seconds", "Mean time between two tokens of a request",
           VLLM_STEP),
    MetricRow(
        _HISTOGRAM, "whole",
        Exposed("e2e_request_latency_seconds", "From a request's arrival to its end", SECONDS),
        Exposed("e2e_request_latency_seconds", "Time from arrival to end", VLLM_REQUEST),
    ),
    _times("queue", "request_queue_time_seconds", "Time in the scheduler's queue", VLLM_REQUEST),
    _times("inference", "request_inference_time_seconds", "Time from placement to the last token", VLLM_REQUEST),
    _times("prefill", "request_prefill_time_seconds", "Time from placement to the first token", VLLM_REQUEST),
    _times("decode", "request_decode_time_seconds", "Time from first to last token", VLLM_REQUEST),
    MetricRow(
        _HISTOGRAM, "request_prompt_tokens",
        Exposed("request_prompt_tokens", "Prompt tokens of a request", TOKENS),
        Exposed("request_prompt_tokens", "Prompt tokens of a request", None),
    ),
    MetricRow(
        _HISTOGRAM, "request_computed_tokens",
        vllm=Exposed("request_prefill_kv_computed_tokens", "Prompt tokens not cached", None),
    ),
    MetricRow(
        _HISTOGRAM, "request_output_tokens",
        Exposed("request_generation_tokens", "Output tokens of a request", TOKENS),
        Exposed("request_generation_tokens", "Output tokens of a request", None),
    ),
    MetricRow(
        _HISTOGRAM, "max_tokens", vllm=Exposed("request_params_max_tokens", "The max_tokens of a request", None)
    ),
    _times("n", "request_params_n", "The n of a request", VLLM_N),
    MetricRow(
        _HISTOGRAM, "hop", Exposed("kv_hop_seconds", "From the end of prefill to the ack of decode", HOP_SECONDS)
    ),
    MetricRow(
        _HISTOGRAM, "hop_bytes", Exposed("kv_hop_bytes", "Bytes of a prompt's KV from prefill to decode", BYTES)
    ),
    MetricRow(
        _HISTOGRAM, "overlap",
        Exposed("kv_overlap_ratio", "Share of a prompt's KV sent before it was fully computed", SHARES),
    ),
    MetricRow(
        _HISTOGRAM, "stages", Exposed("stage_seconds", "A prompt's stages, each measured where it runs", HOP_SECONDS),
        labels=("stage",),
    ),
    MetricRow(
        _COUNTER, "prompt_tokens", Exposed("prompt_tokens", "Prompt tokens of requests that got a first token"),
        Exposed("prompt_tokens", "Prompt tokens"),
    ),
    MetricRow(
        _COUNTER, "output_tokens", Exposed("generation_tokens", "Output tokens"),
        Exposed("generation_tokens", "Output tokens"),
    ),
    MetricRow(_COUNTER, "kv_bytes", Exposed("kv_handoff_bytes", "KV bytes of finished hand-offs")),
    MetricRow(
        _COUNTER, "kv_bytes_early",
        Exposed("kv_handoff_early_bytes", "KV bytes sent while their prompt was being computed"),
    ),
)  # fmt: skip
TRACES = (
    MetricRow(_COUNTER, "num_sent", Exposed("trace_spans_sent", "Spans accepted by the collector")),
    MetricRow(_COUNTER, "num_dropped", Exposed("trace_spans_dropped", "Spans not accepted by the collector")),
)
OUTCOMES = (
    MetricRow(
        _COUNTER, "http", Exposed("http_requests", "HTTP requests answered"), labels=("route", "method", "status")
    ),
    MetricRow(
        _COUNTER, "endings", Exposed("request_endings", "How generation requests ended"), labels=("ending",)
    ),
    MetricRow(
        _COUNTER, "finished_reasons", vllm=Exposed("request_success", "Finished sequences"), labels=("finished_reason",)
    ),
)  # fmt: skip
LOADS = (
    MetricRow(_GAUGE, "blocks_in_use", Exposed("kv_blocks_used", "KV blocks used by sequences and tickets")),
    MetricRow(_GAUGE, "blocks_used", instance=Exposed("blocks_used", "KV blocks in use, including those of probes")),
    _load(_GAUGE, "blocks_cached", "kv_blocks_cached", "KV blocks with a reusable prefix"),
    _load(_GAUGE, "blocks_swapped", "kv_blocks_swapped", "KV blocks of preempted prompts swapped out of the pool"),
    _load(_GAUGE, "blocks_total", "kv_blocks_total", "KV blocks of the pool"),
    _load(_GAUGE, "blocks_probe", "kv_blocks_probe", "KV blocks used by probes"),
    _load(
        _GAUGE, "running", "running", "Sequences in the batch",
        Exposed("num_requests_running", "Sequences in the instance's batch"),
    ),
    MetricRow(_GAUGE, "share_used", vllm=Exposed("kv_cache_usage_perc", "Share of the KV pool in use; 1 is all")),
    _load(_GAUGE, "waiting", "waiting", "Sequences waiting in the instance"),
    _load(_GAUGE, "held_prompts", "held_prompts", "Prefilled prompts whose KV is not yet handed off"),
    _load(_GAUGE, "uncomputed_tokens", "uncomputed_tokens", "Prompt tokens accepted and not yet computed"),
    _load(_GAUGE, "progress_age_s", "progress_age_seconds", "Time since the engine last made progress"),
    _load(_GAUGE, "slowest_turn_s", "slowest_turn_seconds", "Longest recent time between two signs of progress"),
    _load(_COUNTER, "kv_bytes_sent", "kv_bytes_sent", "KV bytes sent by the instance"),
    _load(_COUNTER, "kv_bytes_received", "kv_bytes_received", "KV bytes received by the instance"),
    _load(_COUNTER, "kv_frames_corrupt", "kv_frames_corrupt", "KV frames with a wrong digest"),
    _load(_COUNTER, "kv_frames_resent", "kv_frames_resent", "KV frames sent a second time"),
    _load(_COUNTER, "kv_frames_dropped", "kv_frames_dropped", "KV frames without a valid ticket"),
    _load(_COUNTER, "kv_frames_duplicate", "kv_frames_duplicate", "KV frames that had already arrived"),
    _load(_COUNTER, "kv_links_refused", "kv_links_refused", "KV links that the instance refused"),
    _load(_COUNTER, "preemptions", "preemptions", "Prompts preempted for lack of blocks"),
    _load(
        _COUNTER, "prefix_tokens_sought", "prefix_tokens_sought", "Tokens looked up in the prefix cache",
        Exposed("prefix_cache_queries", "Tokens looked up in the prefix cache"),
    ),
    _load(
        _COUNTER, "prefix_tokens_found", "prefix_tokens_found", "Tokens found in the prefix cache",
        Exposed("prefix_cache_hits", "Tokens found in the prefix cache"),
    ),
    MetricRow(_COUNTER, "preemptions", vllm=Exposed("num_preemptions", "Prompts preempted for lack of blocks")),
    _load(_COUNTER, "steps", "steps", "Steps of the instance"),
    _load(_COUNTER, "step_seconds", "step_seconds", "Seconds spent in its steps"),
    _load(_COUNTER, "tokens_computed", "tokens_computed", "Tokens computed by its model"),
    _load(_COUNTER, "starved_s", "starved_seconds", "Time for which the machine kept the instance from running"),
)  # fmt: skip
