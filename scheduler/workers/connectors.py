"""The KV connectors of vLLM and vllm-ascend, and the order in which each asks the two workers."""

PREFILL_FIRST = "prefill_first"
DECODE_FIRST = "decode_first"
AUTO = "auto"

PATHS = {AUTO: PREFILL_FIRST, "nixl": PREFILL_FIRST, "ascend": PREFILL_FIRST, "ascend-layerwise": DECODE_FIRST}
"""The path of each connector's name. `auto`: any that answers a prefill with a reference."""

NOT_SERVED = {
    "nixl-push": "NixlPushConnector is asked on both workers at once, which is not supported: use NixlConnector",
    "mooncake": "MooncakeConnector is asked on both workers at once, which is not supported: use NixlConnector",
}
"""Why a connector cannot be used."""
