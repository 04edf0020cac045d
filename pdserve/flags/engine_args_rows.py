"""The fields of vLLM 0.33's EngineArgs that are in none of the older tables, as flags."""

from collections.abc import Callable, Iterator
from typing import Final

from pdserve.flags.row import Arity, VllmFlag, no_effect, refused

_LISTS: Final = frozenset((
    "cudagraph-capture-sizes", "numa-bind-nodes", "numa-bind-cpus", "device-ids", "cpu-offload-params",
    "lora-target-modules", "sleep-preserve-parameter-names", "kv-cache-dtype-skip-layers",
))  # fmt: skip
_SWITCHES: Final = frozenset((
    "use-tqdm-on-load", "numa-bind", "dcp-q-replicate", "data-parallel-hybrid-lb", "data-parallel-external-lb",
    "data-parallel-multi-port-external-lb", "enable-hc-sp", "enable-batch-sharded-sampling",
    "enable-ep-weight-filter", "enable-elastic-ep", "enable-dbo", "disable-nccl-for-dp-synchronization",
    "enable-eplb", "disable-cascade-attn", "long-prefill-token-threshold-adaptive", "use-fp64-gumbel",
    "enable-trace-replay", "aggregate-engine-logging", "allow-deprecated-quantization", "enable-shm-tensor-arena",
    "language-model-only", "interleave-mm-strings", "mm-encoder-only", "skip-mm-profiling",
    "mm-device-do-normalize", "enable-tower-connector-lora", "specialize-active-lora",
    "enable-mixed-moe-lora-format", "enable-moe-shared-loras", "disable-chunked-mm-input",
    "scheduler-reserve-full-isl", "disable-hybrid-kv-cache-manager", "kv-cache-metrics", "cudagraph-metrics",
    "enable-layerwise-nvtx-tracing", "enable-mfu-metrics", "enable-logging-iteration-details",
    "jit-monitor-verbose", "enable-mm-processor-stats", "enable-flashinfer-autotune", "monokernel",
    "sleep-mode-offload-cudagraph", "enable-cumem-allocator", "enable-nccl-comm-suspend",
    "enable-mamba-shared-prefix-checkpoint", "use-replayssm", "enable-mamba-cache-stochastic-rounding",
    "kv-sharing-fast-prefill", "swa-bounded-replay", "enable-fault-tolerance", "fail-on-environ-validation",
))  # fmt: skip

_NO_EFFECT: Final = {
    "the engine chooses how to read files": (
        "safetensors-load-strategy", "safetensors-prefetch-num-threads", "safetensors-prefetch-block-size",
        "pt-load-map-location", "use-tqdm-on-load",
    ),
    "graphs are captured for every length": ("cudagraph-capture-sizes", "max-cudagraph-capture-size"),
    "the engine chooses its kernels": (
        "ir-op-priority", "moe-backend", "linear-backend", "sparse-indexer-topk-backend", "all2all-backend",
        "gdn-prefill-backend", "kda-prefill-backend", "kda-decode-backend", "kernel-config",
        "enable-flashinfer-autotune", "monokernel", "disable-cascade-attn", "optimization-level",
        "performance-mode", "allow-deprecated-quantization", "kv-sharing-fast-prefill", "swa-bounded-replay",
    ),
    "the ranks of an instance are on one host and connect by themselves": (
        "master-addr", "master-port", "distributed-timeout-seconds", "cpu-distributed-timeout-seconds",
        "enable-shm-tensor-arena",
    ),
    "the engine assigns cores to devices": ("numa-bind", "numa-bind-nodes", "numa-bind-cpus"),
    "only --tensor-parallel-size splits an instance": (
        "dcp-comm-backend", "dcp-q-replicate", "dcp-kv-cache-interleave-size", "cp-kv-cache-interleave-size",
        "enable-batch-sharded-sampling", "enable-ep-weight-filter", "elastic-ep-max-dp-size", "eplb-config",
        "expert-placement-strategy",
    ),
    "add instances as entries of the ranktable": (
        "data-parallel-backend", "dp-sync-interval", "disable-nccl-for-dp-synchronization",
    ),
    "each step is one forward pass": (
        "enable-dbo", "ubatch-size", "dbo-decode-token-threshold", "dbo-prefill-token-threshold",
    ),
    "blocks are hashed by SHA-256 and evicted in LRU order": (
        "prefix-caching-hash-algo", "prefix-cache-retention-interval", "prefix-match-unit",
    ),
    "--max-num-batched-tokens and --prefill-chunk-size bound a step": (
        "max-num-scheduled-tokens", "long-prefill-token-threshold", "long-prefill-token-threshold-adaptive",
        "prefill-schedule-interval",
    ),
    "docs/admission.md describes how blocks are reserved": (
        "scheduler-reserve-full-isl", "watermark", "disable-hybrid-kv-cache-manager",
    ),
    "a token is drawn with one uniform random number, without Gumbel noise": ("use-fp64-gumbel",),
    "logs are set by --log-level and --log-format": (
        "aggregate-engine-logging", "enable-logging-iteration-details",
    ),
    "docs/images.md describes how images are processed": (
        "language-model-only", "interleave-mm-strings", "mm-processor-cache-type",
        "mm-hasher-algorithm", "mm-shm-cache-max-object-size-mb", "mm-encoder-tp-mode", "mm-encoder-attn-backend",
        "mm-encoder-attn-dtype", "mm-encoder-fp8-scale-path", "mm-encoder-fp8-scale-save-path",
        "mm-encoder-fp8-scale-save-margin", "skip-mm-profiling", "video-pruning-rate", "video-pruning-method",
        "mm-tensor-ipc", "mm-processor-device", "mm-ipc-gpu-memory-gb", "mm-device-do-normalize",
        "disable-chunked-mm-input", "ec-manager-config",
    ),
    "docs/metrics.md lists the metrics": (
        "show-hidden-metrics-for-version", "per-request-spec-decode-metrics", "kv-cache-metrics",
        "kv-cache-metrics-sample", "custom-histogram-buckets", "cudagraph-metrics",
        "enable-layerwise-nvtx-tracing", "enable-mfu-metrics", "jit-monitor-mode", "jit-monitor-verbose",
        "enable-mm-processor-stats",
    ),
    "there is no sleep mode": (
        "sleep-mode-backend", "sleep-mode-offload-cudagraph", "sleep-preserve-parameter-names",
        "enable-cumem-allocator", "enable-nccl-comm-suspend",
    ),
    "failures are detected and retried without it": (
        "fault-tolerance-config", "enable-fault-tolerance", "watchdog-config",
    ),
    "unknown variables are reported at start": ("fail-on-environ-validation",),
}  # fmt: skip
_REFUSED: Final = {
    "config and weights come from the model's folder": ("hf-config-path", "model-weights"),
    "the ranktable or the vendor's environment variable selects devices": ("device-ids",),
    "only --tensor-parallel-size splits an instance": ("enable-hc-sp", "enable-elastic-ep", "enable-eplb"),
    "add instances as entries of the ranktable": (
        "data-parallel-rank", "data-parallel-start-rank", "data-parallel-size-local", "data-parallel-address",
        "data-parallel-rpc-port", "data-parallel-hybrid-lb", "data-parallel-external-lb",
        "data-parallel-multi-port-external-lb",
    ),
    "weights stay on their device": ("cpu-offload-params",),
    "there is one kind of KV pool": ("kv-cache-dtype-skip-layers",),
    "the KV of finished prompts stays in the pool": ("kv-offloading-size", "kv-offloading-backend"),
    "set --max-num-seqs": ("max-num-active-seqs",),
    "set --max-queued-requests": ("max-num-queued-reqs",),
    "set --max-queued-tokens": ("max-num-queued-tokens",),
    "third-party code is not run in the engine": (
        "scheduler-cls", "worker-extension-cls", "model-class-overrides", "io-processor-plugin",
    ),
    "not supported yet": ("reasoning-parser-plugin",),
    "steps are not recorded": ("enable-trace-replay",),
    "docs/images.md describes how images are processed": ("media-io-kwargs", "mm-encoder-only"),
    "adapters are not supported: merge them into the weights": (
        "default-mm-loras", "lora-target-modules", "enable-tower-connector-lora", "specialize-active-lora",
        "enable-mixed-moe-lora-format", "enable-moe-shared-loras", "max-lora-cls-labels",
    ),
    "docs/http-api.md lists the response fields": ("aux-output-config",),
    "outputs are sampled without a watermark": ("watermark-config",),
    "only autoregressive models are supported": ("diffusion-config",),
    "models with an engram memory are not supported": ("engram-config",),
    "models whose state is not a KV cache are not supported": (
        "mamba-config", "mamba-cache-dtype", "mamba-ssm-cache-dtype", "mamba-block-size", "mamba-cache-mode",
        "enable-mamba-shared-prefix-checkpoint", "replayssm-buffer-len", "use-replayssm", "mamba-backend",
        "mamba-ssu-algorithm", "enable-mamba-cache-stochastic-rounding", "mamba-cache-philox-rounds",
    ),
    "logs are set by --log-level and --log-format": ("logging-config", "log-config-file"),
    "instances transfer KV themselves": ("kv-events-config", "ec-transfer-config"),
    "weights cannot be replaced while a server runs": ("weight-transfer-config",),
}  # fmt: skip


def _rows(row: Callable[[str, str, Arity], VllmFlag], names_by_why: dict[str, tuple[str, ...]]) -> Iterator[VllmFlag]:
    for why, names in names_by_why.items():
        for name in names:
            arity = Arity.NOTHING if name in _SWITCHES else Arity.MANY if name in _LISTS else Arity.ONE
            yield row(f"--{name}", why, arity)


ENGINE_ARGS_ROWS: Final[tuple[VllmFlag, ...]] = (
    *_rows(no_effect, _NO_EFFECT),
    no_effect("--nnodes", "the ranks of an instance are on one host", only=("1",)),
    no_effect("--node-rank", "the ranks of an instance are on one host", only=("0",)),
    no_effect("--prefill-context-parallel-size", "only --tensor-parallel-size splits an instance", only=("1",)),
    no_effect("--decode-context-parallel-size", "only --tensor-parallel-size splits an instance", only=("1",)),
    no_effect("--logprobs-mode", "log probabilities are those of the model's own logits", only=("raw_logprobs",)),
    no_effect("--offload-backend", "weights stay on their device", only=("auto",)),
    *_rows(refused, _REFUSED),
)
