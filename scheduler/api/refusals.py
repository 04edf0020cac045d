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

Refusal = tuple[tuple[Any, ...], str]
"""The values that ask for nothing (null always does), and the reason."""
_NOTHING: tuple[Any, ...] = ()
_OFF: tuple[Any, ...] = (False,)
_NO_TOOLS = "tools are not supported yet: leave it out"
_TEXT_ALONE = "models are served for text alone"
NOT_SERVED: dict[str, Refusal] = {
    "tools": (_NOTHING, "tools are not supported yet: leave them out"),
    "tool_choice": (("none",), _NO_TOOLS),
    "functions": (_NOTHING, "functions are not supported: leave them out"),
    "function_call": (("none",), "functions are not supported: leave it out"),
    "logits_processors": (([],), "logits processors from requests are not run"),
    "prompt_embeds": (_NOTHING, "embeddings are not taken as prompts: send text or token ids"),
    "audio": (_NOTHING, _TEXT_ALONE),
    "modalities": ((["text"],), _TEXT_ALONE),
    "media_io_kwargs": (({},), _TEXT_ALONE),
    "mm_processor_kwargs": (({},), _TEXT_ALONE),
    "prediction": (_NOTHING, "predicted output is not used: leave it out"),
    "vllm_xargs": (({},), "they are for plugins of vLLM's engine, which is not run here"),
    "thinking_token_budget": ((-1,), "no reasoning parser separates thoughts from answers: max_tokens bounds both"),
    "watermarking": (_OFF, "outputs are sampled without a watermark"),
    "return_weight_versions": (_OFF, "weights are never replaced while a server runs"),
    "routed_experts_prompt_start": ((0,), "routed experts are not part of answers"),
    "return_prompt_text": (_OFF, "ask for return_token_ids, and /detokenize for their text"),
    "stream_interval": ((1,), "a stream's chunks follow the client's reading: what waits goes out in one"),
}
"""What every route refuses."""

POOLING_NOT_SERVED = NOT_SERVED | {
    "padding": (("do_not_pad",), "a text is computed at its own length: leave it out"),
    "use_activation": (_NOTHING, "the model's own files decide what is done to its outputs"),
    "embed_dtype": (("float32",), "vectors are float32"),
    "endianness": (("native", "little"), "base64 is little-endian"),
}
_NO_PAIR_TEMPLATE = "a pair of texts is read without a chat template"
_PAIRS = "the texts of a score are text_1 and text_2"
_CUT = "truncate_prompt_tokens bounds a pair of texts"
SCORE_NOT_SERVED = (
    POOLING_NOT_SERVED
    | {
        "chat_template_kwargs": (({},), _NO_PAIR_TEMPLATE),
        "instruction": (_NOTHING, _NO_PAIR_TEMPLATE),
        "max_tokens_per_query": ((0,), _CUT),
        "max_tokens_per_doc": ((0,), _CUT),
    }
    | dict.fromkeys(("data_1", "data_2", "queries", "documents", "items"), (_NOTHING, _PAIRS))
)

WITHOUT_EFFECT: dict[str, str] = {
    "session_id": "requests of a conversation are placed where their prefix is cached, found by its tokens",
    "include_reasoning": "no reasoning parser runs: what a model thinks is part of its text, as in vLLM without one",
    "parallel_tool_calls": "there are no calls: tools are refused",
    "return_token_offsets": "of vLLM's render routes alone; its generation routes ignore it too",
    "mm_payload": "of vLLM's render routes alone; its generation routes ignore it too",
    "return_mm_kwargs": "of vLLM's render routes alone; its generation routes ignore it too",
    "metadata": "the client's own notes", "store": "nothing is stored", "service_tier": "there is one",
    "safety_identifier": "as user: the client's own name for who asks", "prompt_cache_key": "as session_id",
}  # fmt: skip
"""Fields of other APIs that are taken, as by their nature they change nothing here, and why."""


def refuse_fields(body: Mapping[str, Any], not_served: Mapping[str, Refusal]) -> None:
    """Raise InvalidRequest if a body asks for what is not served, or sets what belongs to the cluster."""
    for name, value in body.items():
        if name in TRANSFER_FIELDS:
            raise InvalidRequest(f"{name} belongs to the cluster: clients may not set it", name)
        if value is not None and name in not_served:
            neutral, reason = not_served[name]
            if not any(value == one and type(value) is type(one) for one in neutral):
                raise InvalidRequest(f"{name}: {reason}", name)
