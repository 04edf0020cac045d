"""Fields that a client may not set, and wishes that are not served: refused in words, never silently ignored."""

from collections.abc import Mapping
from typing import Any

from wire.errors import InvalidRequest

TRANSFER_FIELDS = frozenset((
    "kv_transfer_params", "ticket", "ticket_id", "epoch", "lease_s", "endpoints", "kv_endpoint", "probe",
    "do_remote_prefill", "do_remote_decode", "remote_engine_id", "remote_block_ids", "remote_host", "remote_port",
    "remote_request_id", "remote_tp_size", "remote_dp_rank", "tp_size", "engine_id", "transfer_id", "block_ids",
    "bootstrap_host", "bootstrap_port", "bootstrap_room", "prefill_instance", "decode_instance", "link_epoch",
    "ec_transfer_params", "disaggregated_params", "kv_holder", "prompt_id",
))  # fmt: skip
"""Names of ours and of other engines' for how KV is handed on; refused by name whatever their value, null too."""

_NOTHING: tuple[Any, ...] = ()
_NOT_SERVED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": (_NOTHING, "tools are not supported yet: leave them out"),
    "tool_choice": (("none",), "tools are not supported yet: leave it out"),
    "functions": (_NOTHING, "functions are not supported: leave them out"),
    "function_call": (("none",), "functions are not supported: leave it out"),
    "logits_processors": (([],), "logits processors from requests are not run"),
    "prompt_embeds": (_NOTHING, "embeddings are not taken as prompts: send text or token ids"),
    "audio": (_NOTHING, "models are served for text alone"),
    "modalities": ((["text"],), "models are served for text alone"),
    "prediction": (_NOTHING, "predicted output is not used: leave it out"),
}
"""What is refused, with the values that ask for nothing (null always does) and the reason."""


def refuse_fields(body: Mapping[str, Any]) -> None:
    """Raise InvalidRequest if a body asks for what is not served, or sets what belongs to the cluster."""
    for name, value in body.items():
        if name in TRANSFER_FIELDS:
            raise InvalidRequest(f"{name} belongs to the cluster: clients may not set it", name)
        if value is not None and name in _NOT_SERVED:
            neutral, reason = _NOT_SERVED[name]
            if value not in neutral:
                raise InvalidRequest(f"{name}: {reason}", name)
