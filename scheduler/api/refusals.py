"""Fields that clients may not set and options that are not supported: refused with a reason, never ignored."""

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
"""KV transfer fields of this and other engines; refused by name whatever their value, even null."""

Refusal = tuple[tuple[Any, ...], str]
"""The values that have no effect (null always has none), and the reason for refusing others."""
_NOTHING: tuple[Any, ...] = ()
_OFF: tuple[Any, ...] = (False,)
_IDS_ALONE = "only token ids are read here: send images to /v1/chat/completions"
_CHATS_ONLY = "tools are for chats: use /v1/chat/completions"
_TEXT_AND_IMAGES = "only text and images are served"
_OWN_SETTINGS = "the model's own image processor is used, with its settings"
_WITHOUT_TOOLS: dict[str, Refusal] = {
    "tools": (_NOTHING, _CHATS_ONLY),
    "tool_choice": (("none",), _CHATS_ONLY),
    "functions": (_NOTHING, _CHATS_ONLY),
    "function_call": (("none",), _CHATS_ONLY),
}
WITH_TOOLS_NOT_SERVED: dict[str, Refusal] = {
    "logits_processors": (([],), "logits processors from requests are not run"),
    "prompt_embeds": (_NOTHING, "embeddings are not accepted as prompts: send text or token ids"),
    "audio": (_NOTHING, _TEXT_AND_IMAGES),
    "modalities": ((["text"],), "answers are text"),
    "media_io_kwargs": (({},), _OWN_SETTINGS),
    "mm_processor_kwargs": (({},), _OWN_SETTINGS),
    "prediction": (_NOTHING, "predicted output is not used: leave it out"),
    "vllm_xargs": (({},), "they are for plugins of vLLM's engine, which pdserve does not run"),
    "watermarking": (_OFF, "outputs are sampled without a watermark"),
    "return_weight_versions": (_OFF, "weights are never replaced while a server runs"),
    "routed_experts_prompt_start": ((0,), "routed experts are not part of answers"),
    "return_prompt_text": (_OFF, "use return_token_ids, and /detokenize for their text"),
    "stream_interval": ((1,), "the tokens of each step are sent at once"),
}
"""Refused by every route."""
NOT_SERVED = _WITHOUT_TOOLS | WITH_TOOLS_NOT_SERVED
"""Refused by routes without tools."""

TOKENS_NOT_SERVED = WITH_TOOLS_NOT_SERVED | {
    "features": (_NOTHING, _IDS_ALONE),
    "content_parts": (([],), _IDS_ALONE),
}
SAMPLING_NOT_SERVED = NOT_SERVED | {
    "extra_args": (({},), "they are for plugins of vLLM's engine, which pdserve does not run"),
    "skip_reading_prefix_cache": (_OFF, "use a cache_salt that no other request has"),
    "trace_decode_token_ids": (_NOTHING, "the output is what the model generates"),
}
"""Refused by /inference/v1/generate, and in its sampling_params."""

POOLING_NOT_SERVED = NOT_SERVED | {
    "padding": (("do_not_pad",), "texts are computed without padding: leave it out"),
    "late_chunking_params": (_NOTHING, "late chunking is not served: /pooling has the vector of each token"),
}
CLASSIFY_NOT_SERVED = POOLING_NOT_SERVED | {
    "embed_dtype": (("float32",), "only vectors have it: probabilities and scores are JSON numbers"),
    "endianness": (("native", "little"), "only vectors have it: probabilities and scores are JSON numbers"),
}
_NO_PAIR_TEMPLATE = "a pair of texts is encoded without a chat template"
SCORE_NOT_SERVED = CLASSIFY_NOT_SERVED | {
    "chat_template_kwargs": (({},), _NO_PAIR_TEMPLATE),
    "instruction": (_NOTHING, _NO_PAIR_TEMPLATE),
}
RERANK_NOT_SERVED = SCORE_NOT_SERVED | {
    "rank_fields": ((["text"],), "documents are compared by their text"),
    "max_chunks_per_doc": ((1,), "documents are not split: cut them with max_tokens_per_doc"),
}

WITHOUT_EFFECT: dict[str, str] = {
    "session_id": "placement finds the instance with the cached prefix by a request's tokens",
    "return_token_offsets": "used only by vLLM's render routes; its generation routes ignore it too",
    "mm_payload": "used only by vLLM's render routes; its generation routes ignore it too",
    "return_mm_kwargs": "used only by vLLM's render routes; its generation routes ignore it too",
    "metadata": "the client's own notes", "store": "only responses are stored", "service_tier": "there is only one",
    "token_offsets": "vLLM generates without them too", "parse_context": "read only for answers that are chats",
    "reasoning_ended": "the prompt's own markers show it", "reasoning_parser_kwargs": "see reasoning_ended",
    "flat_logprobs": "log probabilities have one form", "output_kind": "`stream` decides it",
    "skip_clone": "vLLM's own state", "output_text_buffer_length": "vLLM's own state",
    "safety_identifier": "like `user`, names the client's end user", "prompt_cache_key": "see session_id",
}  # fmt: skip
"""Fields of other APIs that are accepted because ignoring them is harmless, and why."""


def refuse_fields(body: Mapping[str, Any], not_served: Mapping[str, Refusal]) -> None:
    """Raise InvalidRequest if a body sets an unsupported option or a field that only the cluster may set."""
    for name, value in body.items():
        if name in TRANSFER_FIELDS:
            raise InvalidRequest(f"{name} belongs to the cluster: clients may not set it", name)
        if value is not None and name in not_served:
            neutral, reason = not_served[name]
            if not any(value == one and type(value) is type(one) for one in neutral):
                raise InvalidRequest(f"{name}: {reason}", name)
