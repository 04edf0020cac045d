"""Flags of vLLM after 0.6 that stand in lines people copy today; complete for none of its releases."""

from typing import Final

from pdserve.flags.row import Takes, VllmFlag, no_effect, refused, supported

_NOTHING = Takes.NOTHING

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
)
