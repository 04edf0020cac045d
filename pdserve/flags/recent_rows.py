"""Flags of vLLM after 0.6 that stand in lines people copy today; complete for none of its releases."""

from typing import Final

from pdserve.flags.row import Takes, VllmFlag, no_effect, refused, supported

_NOTHING = Takes.NOTHING
_KIND = "what a model does is read from its config"

RECENT_ROWS: Final[tuple[VllmFlag, ...]] = (
    supported("--shutdown-timeout"),
    supported("--attention-backend"),
    supported("--default-chat-template-kwargs"),
    supported("--trust-request-chat-template", _NOTHING),
    no_effect("--enable-log-requests", "prompts are never logged", _NOTHING),
    no_effect("--disable-uvicorn-access-log", "there is no access log", _NOTHING),
    no_effect("--structured-outputs-config.backend", "llguidance compiles the grammars"),
    no_effect("--async-scheduling", "how steps overlap is the engine's own", _NOTHING),
    no_effect("--stream-interval", "each step is streamed", only=("1",)),
    no_effect("--data-parallel-size", "more instances are entries of the ranktable", only=("1",), short="-dp"),
    refused("--hf-token", "a command line is no place for a token: set HF_TOKEN, or log in by `hf auth login`"),
    refused("--reasoning-parser", "not supported yet"),
    supported("--override-generation-config"),
    supported("--enable-force-include-usage", _NOTHING),
    no_effect("--enable-server-load-tracking", "/load always says how many requests are under way", _NOTHING),
    supported("--enable-tokenizer-info-endpoint", _NOTHING),
    supported("--sse-keep-alive-interval"),
    refused("--enable-expert-parallel", "an instance is divided by --tensor-parallel-size alone", _NOTHING),
    refused("--enable-scale-out", "instances speak gRPC among themselves", _NOTHING),
    refused("--tokens-only", "the front door speaks text", _NOTHING),
    refused("--speculative-config", "there is no speculative decoding"),
    supported("--kv-cache-memory-bytes", becomes="--kv-cache-memory"),
    no_effect("--runner", _KIND, only=("auto", "generate", "pooling")),
    no_effect("--convert", _KIND, only=("auto", "none", "embed")),
    no_effect("--model-impl", "models are those of transformers", only=("auto", "transformers")),
    no_effect("--allowed-media-domains", "models are served for text alone", Takes.MANY),
    refused("--pooler-config", "a pooler is as the model has it"),
    no_effect(
        "--structured-outputs-config",
        "llguidance compiles the grammars; white space and additional properties are fields of a request",
    ),
    refused("--logits-processors", "logits processors from Python are not run", Takes.MANY),
    no_effect("--renderer-num-workers", "templates are rendered by one process of their own"),
    refused("--enable-prompt-embeds", "prompts are texts or token ids", _NOTHING),
    refused("--enable-sleep-mode", "a model that is not used is closed, and loaded again", _NOTHING),
    refused("--additional-config", "it is for plugins of vLLM's engine, which is not run here"),
    refused("--attention-config", "there is one setting: --attention-backend"),
    refused("--profiler-config", "there is no profiler to be set"),
    refused("--quantization-config", "how weights are quantised is read from the model's config"),
    *(refused(f"--spec-{part}", "there is no speculative decoding") for part in ("method", "model", "tokens")),
    no_effect("--offload-group-size", "weights stay on their device", only=("0",)),
    no_effect("--offload-num-in-group", "weights stay on their device", only=("1",)),
    no_effect("--offload-prefetch-step", "weights stay on their device", only=("1",)),
    refused("--offload-params", "weights stay on their device", Takes.MANY),
    refused("--enable-return-routed-experts", "which experts are taken is not told", _NOTHING),
    refused("--return-sampling-mask", "what sampling leaves out is not told", _NOTHING),
)
