"""Fields that a client may not set, and fields not supported yet: refused in words, never silently ignored."""

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

_OFF: tuple[Any, ...] = (False,)
_ZERO: tuple[Any, ...] = (0, 0.0)
_ONE: tuple[Any, ...] = (1, 1.0)

# Values that ask for nothing; null is one for every field.
_NOT_YET: dict[str, tuple[Any, ...]] = {
    "tools": (), "tool_choice": ("none",), "functions": (), "function_call": ("none",),
    "top_logprobs": (0,), "prompt_logprobs": (), "return_token_ids": _OFF, "return_tokens_as_token_ids": _OFF,
    "use_beam_search": _OFF, "early_stopping": _OFF, "length_penalty": _ONE,
    "presence_penalty": _ZERO, "frequency_penalty": _ZERO, "repetition_penalty": _ONE,
    "logit_bias": ({},), "bad_words": ([],), "allowed_token_ids": (), "logits_processors": ([],),
    "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (), "guided_json_object": _OFF,
    "guided_decoding_backend": (), "guided_whitespace_pattern": (), "structured_outputs": (),
    "response_format": ({"type": "text"},), "truncate_prompt_tokens": (), "prompt_embeds": (),
    "suffix": ("",), "chat_template": (), "chat_template_kwargs": ({},), "documents": ([],),
    "continue_final_message": _OFF, "audio": (), "modalities": (["text"],), "prediction": (),
    "cache_salt": (), "priority": (0,), "vllm_xargs": ({},),
}  # fmt: skip
_CHAT_ONLY: dict[str, tuple[Any, ...]] = {"logprobs": _OFF, "echo": _OFF}
_COMPLETIONS_ONLY: dict[str, tuple[Any, ...]] = {"logprobs": _OFF}  # 0 asks for the chosen token's


def refuse_chat_fields(body: Mapping[str, Any]) -> None:
    """Raise InvalidRequest if a chat body asks for what is not served."""
    _refuse(body, _NOT_YET | _CHAT_ONLY)


def refuse_completion_fields(body: Mapping[str, Any]) -> None:
    """Raise InvalidRequest if a completion body asks for what is not served."""
    _refuse(body, _NOT_YET | _COMPLETIONS_ONLY)


def _refuse(body: Mapping[str, Any], not_yet: Mapping[str, tuple[Any, ...]]) -> None:
    for name, value in body.items():
        if name in TRANSFER_FIELDS:
            raise InvalidRequest(f"{name} belongs to the cluster: clients may not set it", name)
        if value is not None and name in not_yet and not _is_one_of(value, not_yet[name]):
            raise InvalidRequest(f"{name} is not supported yet: leave it out", name)


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    """False is not 0 here, and True not 1."""
    return any(type(value) is type(item) and value == item for item in neutral)
