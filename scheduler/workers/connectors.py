"""The KV connectors of vLLM and vllm-ascend, and the order in which each asks the two workers."""

PREFILL_FIRST = "prefill_first"
DECODE_FIRST = "decode_first"
AT_ONCE = "both_at_once"
AUTO = "auto"
MOONCAKE = "mooncake"
NIXL_PUSH = "nixl-push"

PATHS = {
    AUTO: PREFILL_FIRST, "nixl": PREFILL_FIRST, "ascend": PREFILL_FIRST, "ascend-layerwise": DECODE_FIRST,
    NIXL_PUSH: AT_ONCE, MOONCAKE: AT_ONCE,
}  # fmt: skip
"""The path of each connector's name. `auto`: any that answers a prefill with a reference."""
