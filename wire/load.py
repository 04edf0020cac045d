"""The load that an instance reports to its schedulers, including its links to peers, and the load's metrics."""

from dataclasses import dataclass

from telemetry.metric_fields import counter, gauge, metrics_of
from telemetry.metric_table import Exposed, MetricKind, MetricRow
from wire.cheap_dataclass import cheap_dataclass

STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the buckets of `LoadSnapshot.step_tokens`."""


@cheap_dataclass(frozen=True, slots=True)
class LinkStatus:
    """The sender's status of the links to one peer.

    `transport` is the one in use. `passed_over` states why each better transport, and each that was measured to be
    slower, is not used. Round trip and bandwidth are from the last measurement, 0 if there was none. `failures`
    counts lost links, `fallbacks` how often a worse transport had to be used.
    """

    peer_id: str
    transport: str
    state: str
    epoch: int
    bytes_sent: int
    failures: int
    fallbacks: int = 0
    round_trip_s: float = 0.0
    bytes_per_s: float = 0.0
    passed_over: tuple[str, ...] = ()


@dataclass(slots=True)  # not frozen, for the reason given at types.TokenLogprobs
class LoadSnapshot:
    """The load that an instance reports with every step and heartbeat: of its engine, of its loop and of its links.

    Sequences and tickets use blocks. `progress_age_s` is the time since the engine loop last finished a turn or layer,
    counting only seconds in which the process could run; `slowest_turn_s` is the longest recent such time, or the
    estimate for the prompt tokens being computed. `step_tokens[i]` counts the steps with at most STEP_TOKEN_BUCKETS[i]
    tokens and more than the previous bound; its last entry counts those above all bounds.
    """

    blocks_used: int = 0
    blocks_cached: int = gauge("KV blocks with a reusable prefix", "kv_blocks_cached")
    blocks_swapped: int = gauge("KV blocks of preempted prompts swapped out of the pool", "kv_blocks_swapped")
    blocks_total: int = gauge("KV blocks of the pool", "kv_blocks_total")
    blocks_probe: int = gauge("KV blocks used by probes", "kv_blocks_probe")
    running: int = gauge("Prompts in the batch, without probes")
    waiting: int = gauge("Sequences waiting in the instance")
    held_prompts: int = gauge("Prefilled prompts whose KV is not yet handed off")
    uncomputed_tokens: int = gauge("Prompt tokens accepted and not yet computed")
    progress_age_s: float = gauge("Time since the engine last made progress", "progress_age_seconds")
    slowest_turn_s: float = gauge("Longest recent time between two signs of progress", "slowest_turn_seconds")
    kv_bytes_sent: int = counter("KV bytes sent by the instance")
    kv_bytes_received: int = counter("KV bytes received by the instance")
    kv_frames_corrupt: int = counter("KV frames with a wrong digest")
    kv_frames_resent: int = counter("KV frames sent a second time")
    kv_frames_dropped: int = counter("KV frames without a valid ticket")
    kv_frames_duplicate: int = counter("KV frames that had already arrived")
    kv_links_refused: int = counter("KV links that the instance refused")
    preemptions: int = counter("Prompts preempted for lack of blocks")
    prefix_tokens_sought: int = counter("Tokens looked up in the prefix cache", vllm="prefix_cache_queries")
    prefix_tokens_found: int = counter("Tokens found in the prefix cache", vllm="prefix_cache_hits")
    prefix_tokens_found_decoded: int = counter("Of the tokens found, those in blocks with generated tokens")
    steps: int = counter("Steps of the instance")
    step_seconds: float = counter("Seconds spent in its steps")
    tokens_computed: int = counter("Prompt tokens computed and output tokens sampled, without probes")
    starved_s: float = counter("Time for which the machine kept the instance from running", "starved_seconds")
    prompts_recomputed: int = counter("Prompts that a worker computed although another one held their KV for it")
    images_waiting: int = gauge("Images that wait to be encoded, or are being encoded", "images_waiting")
    image_cache_bytes: int = gauge("Bytes of image embeddings cached", "image_cache_bytes")
    images_sought: int = counter("Images of prompts looked up among the cached embeddings", vllm="mm_cache_queries")
    images_found: int = counter("Images of prompts whose embeddings were cached", vllm="mm_cache_hits")
    images_encoded: int = counter("Images that were encoded")
    decoding: int = gauge("Sequences that get a token in each step")
    step_base_s: float = gauge("Measured seconds of a step, whatever it computes", "step_base_seconds")
    step_sequence_s: float = gauge("Measured seconds that each sequence adds to a step", "step_sequence_seconds")
    step_token_s: float = gauge("Measured seconds that each prompt token adds to a step", "step_token_seconds")
    gap_limit_s: float = gauge("The shortest limit on gaps among its streams", "gap_limit_seconds")
    step_tokens: tuple[int, ...] = ()
    links: tuple[LinkStatus, ...] = ()

    @property
    def blocks_in_use(self) -> int:
        """Blocks used by sequences and tickets, without those of probes."""
        return self.blocks_used - self.blocks_probe

    @property
    def share_used(self) -> float:
        """`blocks_in_use` divided by all blocks."""
        return self.blocks_in_use / self.blocks_total if self.blocks_total else 0.0


_GAUGE, _COUNTER, _ = MetricKind
LOADS = (
    MetricRow(_GAUGE, "blocks_in_use", Exposed("kv_blocks_used", "KV blocks used by sequences and tickets")),
    MetricRow(_GAUGE, "blocks_used", instance=Exposed("blocks_used", "KV blocks in use, including those of probes")),
    MetricRow(
        _GAUGE, "running", vllm=Exposed("num_requests_running", "Prompts in the instance's batch, without probes")
    ),
    MetricRow(_GAUGE, "share_used", vllm=Exposed("kv_cache_usage_perc", "Share of the KV pool in use; 1 is all")),
    *metrics_of(LoadSnapshot),
    MetricRow(_COUNTER, "preemptions", vllm=Exposed("num_preemptions", "Prompts preempted for lack of blocks")),
)
"""The metrics of a load, in their order on /metrics: one for each field that declares its own, and the others."""
