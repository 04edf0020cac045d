"""A vLLM worker's /metrics as a load snapshot."""

import re
from dataclasses import dataclass

from wire.load import LoadSnapshot

_WANTED = (
    b"num_requests_running", b"num_requests_waiting", b"kv_cache_usage_perc", b"gpu_cache_usage_perc",
    b"generation_tokens_total", b"prompt_tokens_total", b"prefix_cache_queries_total", b"prefix_cache_hits_total",
    b"num_preemptions_total", b"num_requests_kv_fetch_by_stage", b"nixl_num_notifications_after_expiry_total",
    b"nixl_num_kv_expired_reqs_total",
)  # fmt: skip
_LINE = re.compile(rb"^vllm:(" + b"|".join(_WANTED) + rb")(\{[^}\n]*\})? (\S+)", re.MULTILINE)
_STAGES, _IN_PROGRESS = b"num_requests_kv_fetch_by_stage", b'stage="in_progress"'
_CACHE = re.compile(rb"^vllm:cache_config_info\{([^}\n]*)\}", re.MULTILINE)
_ENGINES = re.compile(rb'^vllm:num_requests_running\{[^}\n]*\b(engine="\d+")', re.MULTILINE)
_STARTED = re.compile(rb"^process_start_time_seconds (\S+)", re.MULTILINE)
_LABEL = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class KvCache:
    """The size of a worker's KV cache; 0 if the worker does not report it."""

    num_blocks: int = 0
    block_size: int = 0


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's load. `num_fetching` of its waiting requests have blocks, and wait for KV; None if not reported.

    vLLM 0.33 reports it for decode workers, 0.26 does not. NixlConnector counts on prefill how often KV was held in
    vain to the end of its lease (`expired`), and how often decode workers finished reading after that (`read_late`).
    """

    snapshot: LoadSnapshot
    num_fetching: int | None = None
    expired: int = 0
    read_late: int = 0


def engine_labels(metrics: bytes) -> list[bytes]:
    """Return the label of each data-parallel rank, in order, such as `engine="0"`; empty if the metrics have none."""
    return sorted(set(_ENGINES.findall(metrics)), key=lambda label: (len(label), label))


def kv_cache(metrics: bytes, engine: bytes = b"") -> KvCache:
    """Return the size of the KV cache of the engine with this label, or of all engines without one."""
    blocks, size = 0, 0
    for found in _CACHE.finditer(metrics):
        if engine not in found[1]:
            continue
        labels = dict(_LABEL.findall(found[1]))
        blocks += _number(labels.get(b"num_gpu_blocks"))
        size = _number(labels.get(b"block_size")) or size
    return KvCache(blocks, size)


def started_at(metrics: bytes) -> bytes:
    """Return when the worker's process started, as text from its metrics; empty if they lack it."""
    found = _STARTED.search(metrics)
    return b"" if found is None else found[1]


def read_load(metrics: bytes, cache: KvCache, engine: bytes = b"") -> WorkerLoad:
    """Return the load of the engine with this label, or the sum of all without one; `steps` counts tokens."""
    sums: dict[bytes, float] = {}
    engines, fetching = 0, None
    for name, labels, value in _LINE.findall(metrics):
        if engine not in labels or value == b"NaN":
            continue
        if name == _STAGES:
            fetching = (fetching or 0) + (_IN_PROGRESS in labels) * int(float(value))
        sums[name] = sums.get(name, 0.0) + float(value)
        engines += name == b"num_requests_running"
    usage = sums.get(b"kv_cache_usage_perc", sums.get(b"gpu_cache_usage_perc", 0.0)) / max(1, engines)
    generated, prompts = sums.get(b"generation_tokens_total", 0.0), sums.get(b"prompt_tokens_total", 0.0)
    snapshot = LoadSnapshot(
        blocks_total=cache.num_blocks,
        blocks_used=round(usage * cache.num_blocks),
        running=int(sums.get(b"num_requests_running", 0)),
        waiting=int(sums.get(b"num_requests_waiting", 0)),
        preemptions=int(sums.get(b"num_preemptions_total", 0)),
        prefix_tokens_sought=int(sums.get(b"prefix_cache_queries_total", 0)),
        prefix_tokens_found=int(sums.get(b"prefix_cache_hits_total", 0)),
        steps=int(generated + prompts),
        tokens_computed=int(generated + prompts),
    )
    return WorkerLoad(
        snapshot,
        fetching,
        expired=int(sums.get(b"nixl_num_kv_expired_reqs_total", 0)),
        read_late=int(sums.get(b"nixl_num_notifications_after_expiry_total", 0)),
    )


def _number(value: bytes | None) -> int:
    return int(value) if value is not None and value.isdigit() else 0
