"""The part of a vLLM worker's /metrics that shows its load."""

from collections.abc import Iterator, Sequence

from testing.vllm_worker.rank import WorkerRank
from testing.vllm_worker.settings import WorkerSettings

_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
_COUNTERS = (
    "prompt_tokens", "generation_tokens", "nixl_num_failed_transfers", "nixl_num_kv_expired_reqs",
    "nixl_num_notifications_after_expiry",
)  # fmt: skip


def metrics_text(settings: WorkerSettings, ranks: Sequence[WorkerRank], started_at: float) -> str:
    """Return the page of all ranks; `started_at` is in Unix seconds."""
    return "\n".join((*_lines(settings, ranks), f"process_start_time_seconds {started_at}", ""))


def _lines(settings: WorkerSettings, ranks: Sequence[WorkerRank]) -> Iterator[str]:
    rows = [(rank.number, _values(rank)) for rank in ranks]
    for name in (*_GAUGES, *(f"{name}_total" for name in _COUNTERS)):
        yield f"# TYPE vllm:{name} {'gauge' if name in _GAUGES else 'counter'}"
        for number, values in rows:
            labels = f'engine="{number}",model_name="{settings.model}"'
            yield f"vllm:{name}{{{labels}}} {float(values[name.removesuffix('_total')])}"
    yield "# TYPE vllm:request_success_total counter"
    for rank in ranks:
        for reason, count in rank.counts.requests.items():
            labels = f'engine="{rank.number}",finished_reason="{reason}",model_name="{settings.model}"'
            yield f"vllm:request_success_total{{{labels}}} {float(count)}"
    yield "# TYPE vllm:cache_config_info gauge"
    for rank in ranks:
        labels = f'block_size="{rank.block_size}",engine="{rank.number}",num_gpu_blocks="{rank.num_blocks}"'
        yield f"vllm:cache_config_info{{{labels}}} 1.0"


def _values(rank: WorkerRank) -> dict[str, float]:
    counts = rank.counts
    return {
        "num_requests_running": rank.running,
        "num_requests_waiting": rank.waiting,
        "kv_cache_usage_perc": rank.kv_usage,
        "prompt_tokens": counts.prompt_tokens,
        "generation_tokens": counts.generation_tokens,
        "nixl_num_failed_transfers": counts.failed_transfers,
        "nixl_num_kv_expired_reqs": counts.expired,
        "nixl_num_notifications_after_expiry": counts.reads_after_expiry,
    }
