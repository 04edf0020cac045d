"""The part of a vLLM worker's /metrics that shows its load and its transfers."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from testing.vllm_worker.rank import WorkerRank
from testing.vllm_worker.settings import WorkerSettings

_REASONS = ("stop", "length", "abort", "error", "repetition")


def metrics_text(settings: WorkerSettings, ranks: Sequence[WorkerRank], started_at: float) -> str:
    """Return the page of all ranks; `started_at` is in Unix seconds."""
    families: dict[str, list[str]] = defaultdict(list)
    for rank in ranks:
        own = f'engine="{rank.number}",model_name="{settings.model}"'
        for name, labels, value in _rows(settings, rank):
            families[name].append(f"vllm:{name}{{{own}{labels}}} {float(value)}")
        sizes = f'block_size="{rank.block_size}",engine="{rank.number}",num_gpu_blocks="{rank.num_blocks}"'
        families["cache_config_info"].append(f"vllm:cache_config_info{{{sizes}}} 1.0")
    families["process_start_time_seconds"].append(f"process_start_time_seconds {started_at}")
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def _rows(settings: WorkerSettings, rank: WorkerRank) -> Iterator[tuple[str, str, float]]:
    counts = rank.counts
    yield "num_requests_running", "", rank.running
    yield "num_requests_waiting", "", rank.waiting
    if settings.version >= "0.33":  # also of prefill workers, unlike vLLM
        yield "num_requests_kv_fetch_by_stage", ',stage="waiting_to_start"', rank.waiting - rank.fetching
        yield "num_requests_kv_fetch_by_stage", ',stage="in_progress"', rank.fetching
    yield "kv_cache_usage_perc", "", rank.kv_usage
    yield "prompt_tokens_total", "", counts.computed_tokens + counts.transferred_tokens
    yield "prompt_tokens_by_source_total", ',source="local_compute"', counts.computed_tokens
    yield "prompt_tokens_by_source_total", ',source="external_kv_transfer"', counts.transferred_tokens
    yield "external_prefix_cache_hits_total", "", counts.transferred_tokens
    yield "generation_tokens_total", "", counts.generation_tokens
    for reason in _REASONS:
        yield "request_success_total", f',finished_reason="{reason}"', counts.requests.get(reason, 0)
    if settings.connector.startswith("nixl"):
        yield "nixl_num_failed_transfers_total", "", counts.failed_transfers
        yield "nixl_num_kv_expired_reqs_total", "", counts.expired
        yield "nixl_num_notifications_after_expiry_total", "", counts.reads_after_expiry
