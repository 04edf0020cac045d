"""The groups in which --help lists the flags of engine and scheduler: those of the guide first, in its order."""

from collections.abc import Mapping
from typing import Final

GUIDE: Final = "the guide's flags"
MORE: Final = "more"
GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    GUIDE: (
        "model", "served_model_name", "host", "port", "tensor_parallel_size", "max_model_len", "max_num_seqs",
        "max_num_batched_tokens", "quantization", "dtype",
    ),
    "model": ("revision", "download_dir", "hub", "generation_config", "override_generation_config", "hf_overrides"),
    "device and memory": (
        "device", "share_devices", "kv_cache_memory", "gpu_memory_utilization", "block_size", "swap_bytes",
        "enable_prefix_caching", "reuse_decoded", "prefill_chunk_size", "gap_limit", "attention_backend",
        "enforce_eager", "rank_timeout", "engine", "image_cache_bytes", "image_timeout",
    ),
    "addresses and KV links": (
        "ip", "kv_ip", "http_port", "kv_transport", "kv_links", "kv_digests", "kv_port_range",
    ),
    "ranktable (the scheduler)": ("global_rank_table", "node_ports", "use_openai"),
    "vLLM workers (the scheduler)": ("connector", "worker_api_key_file", "worker_callback"),
    "keys and certificates": (
        "api_key", "api_key_file", "protect_metrics", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs",
        "tls_cert", "tls_key", "tls_ca",
    ),
    "browsers and proxies": (
        "allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials", "root_path",
    ),
    "chat": (
        "chat_template", "chat_template_content_format", "default_chat_template_kwargs", "trust_request_chat_template",
        "response_role", "tool_call_parser", "reasoning_parser",
    ),
    "waits": (
        "startup_timeout", "first_token_timeout", "stall_timeout", "client_timeout", "orphan_limit",
        "shutdown_timeout", "sse_keep_alive_interval", "path", "roles", "when_prefill_is_gone", "when_decode_is_gone",
    ),
    "limits of requests": (
        "max_queued_requests", "max_queued_tokens", "ttft_limit", "request_classes", "retry_share", "min_retries",
        "max_body_bytes", "max_answer_bytes", "max_logprobs", "max_n", "max_prompts", "max_stop_strings",
        "max_stop_chars", "max_inputs",
    ),
    "images in chats": (
        "limit_mm_per_prompt", "max_image_bytes", "enable_mm_embeds", "image_fetch_timeout", "allow_private_urls",
        "allowed_media_domains", "allowed_local_media_path",
    ),
    "answers": (
        "return_tokens_as_token_ids", "enable_prompt_tokens_details", "enable_force_include_usage", "enable_docs",
        "enable_request_id_headers",
        "enable_tokenizer_info_endpoint", "enable_per_request_metrics", "enable_dev_routes",
    ),
    "stored responses": (
        "responses_store", "responses_store_count", "responses_store_bytes", "responses_store_ttl",
    ),
    "logs and traces": ("log_level", "log_format", "otlp_traces_endpoint"),
}  # fmt: skip
"""The fields of each group. Fields in no group are listed under `MORE`."""

_FIELDS: Final = tuple((name, title) for title, names in GROUPS.items() for name in names)
_PLACES: Final = {name: (at, title) for at, (name, title) in enumerate(_FIELDS)}
_RANKS: Final = {title: at for at, title in enumerate((None, *GROUPS, MORE))} | {GUIDE: -1}


def place_of(name: str) -> tuple[int, str]:
    """Return a field's position in the help and the title of its group."""
    return _PLACES.get(name, (len(_PLACES), MORE))


def rank_of(title: str | None) -> int:
    """Return a group's position in the help: the guide's, then the command's own, then the others of GROUPS."""
    return _RANKS.get(title, 0)
