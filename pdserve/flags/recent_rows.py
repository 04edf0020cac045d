"""vLLM's flags after 0.6 that often appear in command lines; incomplete for every release."""

from typing import Final

from pdserve.flags.row import Arity, VllmFlag, no_effect, refused, supported

_NOTHING = Arity.NOTHING
_KIND = "the task is read from the model's config"

_TASKS = ("embed", "classify", "token_embed", "token_classify")
_THINK = (
    '{"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}',
    '{"reasoning_start_str":"<think>","reasoning_end_str":"</think>"}',
)

RECENT_ROWS: Final[tuple[VllmFlag, ...]] = (
    supported("--shutdown-timeout"),
    no_effect("--api-server-count", "`pdserve up --schedulers` starts several schedulers", short="-asc"),
    supported("--attention-backend"),
    supported("--default-chat-template-kwargs"),
    supported("--trust-request-chat-template", _NOTHING),
    no_effect("--enable-log-requests", "prompts are never logged", _NOTHING),
    no_effect("--disable-uvicorn-access-log", "there is no access log", _NOTHING),
    no_effect("--structured-outputs-config.backend", "llguidance compiles the grammars"),
    no_effect("--async-scheduling", "the engine decides how steps overlap", _NOTHING),
    no_effect("--stream-interval", "each step is streamed", only=("1",)),
    no_effect("--data-parallel-size", "add instances as entries of the ranktable", only=("1",), short="-dp"),
    refused("--hf-token", "a token on a command line is visible to others: set HF_TOKEN, or use `hf auth login`"),
    supported("--reasoning-parser"),
    supported("--override-generation-config"),
    supported("--enable-force-include-usage", _NOTHING),
    no_effect("--enable-server-load-tracking", "/load always reports the number of requests in progress", _NOTHING),
    supported("--enable-tokenizer-info-endpoint", _NOTHING),
    supported("--sse-keep-alive-interval"),
    refused("--enable-expert-parallel", "only --tensor-parallel-size splits an instance", _NOTHING),
    no_effect("--enable-scale-out", "/inference/v1/generate is always served, the render routes never", _NOTHING),
    supported("--enable-per-request-metrics", _NOTHING),
    refused("--tokens-only", "the API serves text", _NOTHING),
    refused("--speculative-config", "there is no speculative decoding"),
    supported("--kv-cache-memory-bytes", our_name="--kv-cache-memory"),
    no_effect("--runner", _KIND, only=("auto", "generate", "pooling")),
    no_effect("--convert", _KIND, only=("auto", "none", "embed")),
    no_effect("--model-impl", "model implementations come from transformers", only=("auto", "transformers")),
    supported("--allowed-media-domains", Arity.MANY),
    refused("--pooler-config", "the model's config defines the pooler"),
    no_effect("--pooler-config.task", "the task is a field of a request", only=_TASKS),
    no_effect("--reasoning-config", "--reasoning-parser defines the markers", only=_THINK),
    refused("--uds", "the API is served over TCP only: use --host and --port"),
    no_effect(
        "--structured-outputs-config",
        "llguidance compiles the grammars; white space and additional properties are fields of a request",
    ),
    refused("--logits-processors", "Python logits processors are not supported", Arity.MANY),
    no_effect("--renderer-num-workers", "one separate process renders templates"),
    refused("--enable-prompt-embeds", "prompts are texts or token ids", _NOTHING),
    refused("--enable-sleep-mode", "there is no sleep mode: stop an unused model and start it again", _NOTHING),
    refused("--additional-config", "it is for plugins of vLLM's engine, which pdserve does not use"),
    refused("--attention-config", "use --attention-backend"),
    refused("--profiler-config", "there is no profiler to configure"),
    refused("--quantization-config", "the quantization is read from the model's config"),
    *(refused(f"--spec-{part}", "there is no speculative decoding") for part in ("method", "model", "tokens")),
    no_effect("--offload-group-size", "weights stay on their device", only=("0",)),
    no_effect("--offload-num-in-group", "weights stay on their device", only=("1",)),
    no_effect("--offload-prefetch-step", "weights stay on their device", only=("1",)),
    refused("--offload-params", "weights stay on their device", Arity.MANY),
    refused("--enable-return-routed-experts", "the chosen experts are not returned", _NOTHING),
    refused("--return-sampling-mask", "the sampling mask is not returned", _NOTHING),
)
