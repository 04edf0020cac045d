"""The KV connectors of vLLM and vllm-ascend, and the order in which the two workers get their requests."""

PREFILL_FIRST = "prefill_first"
DECODE_FIRST = "decode_first"
AT_ONCE = "both_at_once"
AUTO = "auto"
MOONCAKE = "mooncake"
NIXL_PUSH = "nixl-push"
BOOTSTRAP_PORT = "VLLM_MOONCAKE_BOOTSTRAP_PORT"
"""The variable of a prefill worker with MooncakeConnector that has the port of its bootstrap server."""
DEFAULT_BOOTSTRAP_PORT = 8998

PATHS = {
    AUTO: PREFILL_FIRST, "nixl": PREFILL_FIRST, "ascend": PREFILL_FIRST, "ascend-layerwise": DECODE_FIRST,
    NIXL_PUSH: AT_ONCE, MOONCAKE: AT_ONCE,
}  # fmt: skip
"""The path of each connector's name. `auto`: any that answers a prefill with a reference."""
