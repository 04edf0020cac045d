"""The KV connectors of vLLM and vllm-ascend, and the order in which the two workers get their requests."""

PREFILL_FIRST = "prefill_first"
DECODE_FIRST = "decode_first"
AT_ONCE = "both_at_once"
AUTO = "auto"
MOONCAKE = "mooncake"
NIXL_PUSH = "nixl-push"
BOOTSTRAP_PORT = "VLLM_MOONCAKE_BOOTSTRAP_PORT"
"""The environment variable with the port of the bootstrap server of a prefill worker with MooncakeConnector."""
DEFAULT_BOOTSTRAP_PORT = 8998

PATHS = {
    AUTO: PREFILL_FIRST, "nixl": PREFILL_FIRST, "ascend": PREFILL_FIRST, "ascend-layerwise": DECODE_FIRST,
    NIXL_PUSH: AT_ONCE, MOONCAKE: AT_ONCE,
}  # fmt: skip
"""The path of each value of --connector. `auto`: any connector whose prefill answers with a reference to the KV."""
