"""A load's result as JSON with the keys of vLLM's `bench serve`, for tools that read those."""

from collections.abc import Sequence
from typing import Any

from pdserve.bench.load.client_cpu import ClientCpu
from pdserve.bench.load.record import LoadRecord
from pdserve.bench.load.summary import Summary
from pdserve.bench.load.timeline import Timeline

DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")
"""Keys with a value for each request, omitted without --save-detailed as in vLLM."""


def measured(
    record: LoadRecord, summary: Summary, client: ClientCpu, *, detailed: bool, pooled: bool = False
) -> dict[str, Any]:
    """Return the measured part of the result; times of single requests are in seconds, others in the unit of the key.

    `pooled`: the answers are vectors. The result then has two extra keys, and each request counts as one input.
    """
    fields = _total_fields(summary) | _list_fields(record.in_order, record.began_s) | _spread_fields(summary)
    if not detailed:
        fields = {key: value for key, value in fields.items() if key not in DETAILS}
    ours: dict[str, Any] = {
        "error_counts": dict(record.errors()),
        "unfinished": summary.unfinished,
        "client_cpu_share": client.share,
    }
    if pooled:
        ours["total_input_sequences"] = summary.completed
        ours["input_sequence_throughput"] = summary.rate(summary.completed)
    return fields | ours


def _total_fields(summary: Summary) -> dict[str, Any]:
    return {
        "duration": summary.duration_s,
        "completed": summary.completed,
        "failed": summary.failed,
        "total_input_tokens": summary.input_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_throughput": summary.rate(summary.completed),
        "request_goodput": None if summary.good is None else summary.rate(summary.good),
        "output_throughput": summary.rate(summary.output_tokens),
        "total_token_throughput": summary.rate(summary.input_tokens + summary.output_tokens),
        "max_output_tokens_per_s": summary.peak_output_tokens,
        "max_concurrent_requests": summary.peak_requests,
        "rtfx": 0.0,  # only for speech
    }


def _list_fields(lines: Sequence[Timeline], began_s: float) -> dict[str, Any]:
    return {
        "input_lens": [line.input_len for line in lines],
        "output_lens": [0 if line.failure else line.output_len for line in lines],
        "ttfts": [line.ttft_s for line in lines],
        "itls": [list(line.itls_s) for line in lines],
        "latencies": [line.e2el_s for line in lines],
        "start_times": [line.sent_s - began_s for line in lines],
        "queue_times": [line.queue_s for line in lines],
        "generated_texts": [line.text for line in lines],
        "errors": [str(line.failure) if line.failure else "" for line in lines],
    }


def _spread_fields(summary: Summary) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, spread in summary.spreads.items():
        fields[f"mean_{name}_ms"] = spread.mean
        fields[f"median_{name}_ms"] = spread.median
        fields[f"std_{name}_ms"] = spread.std
        for percent, value in spread.percentiles.items():
            fields[f"p{percent:g}_{name}_ms"] = value
    return fields
