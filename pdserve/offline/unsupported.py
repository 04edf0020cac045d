"""Members of vLLM's offline classes that pdserve's lack, each with the reason."""

from collections.abc import Mapping
from typing import Any

_ENGINE = "the engine may be in another process, and only accepts requests"
_SLEEP = "close() frees all memory, and LLM(...) loads the model again"
_QUEUE = "generate and chat accept all prompts at once, and several threads may call them"
_RENDERED = "generate accepts texts and token ids, and chat renders messages"
_WEIGHTS = "the weights come from the model's folder: create another LLM to use other weights"
_PROFILE = "`pdserve bench engine` shows where the time is spent"

MEMBERS: Mapping[str, str] = {
    "apply_model": _ENGINE,
    "collective_rpc": _ENGINE,
    "default_sampling_params": "get_default_sampling_params() returns them",
    "deprecate_legacy_api": "there is no legacy API here",
    "engine_class": _ENGINE,
    "enqueue": _QUEUE,
    "enqueue_chat": _QUEUE,
    "finish_weight_update": _WEIGHTS,
    "get_world_size": "it is the tensor_parallel_size given to LLM(...)",
    "init_weight_transfer_engine": _WEIGHTS,
    "input_processor": _RENDERED,
    "llm_engine": f"{_ENGINE}; model_config, get_tokenizer() and get_metrics() return what is known",
    "preprocess_chat": _RENDERED,
    "preprocess_cmpl": _RENDERED,
    "release_kv_cache_memory": "LLM(..., kv_cache_memory=...) sets its size, and close() frees it",
    "renderer": _RENDERED,
    "request_counter": "a request's id is RequestOutput.request_id",
    "reset_mm_cache": "embeddings of images are always cached",
    "sleep": _SLEEP,
    "start_profile": _PROFILE,
    "start_weight_update": _WEIGHTS,
    "stop_profile": _PROFILE,
    "supported_tasks": "generate, embed, classify and score raise an error if the model lacks them",
    "update_weights": _WEIGHTS,
    "vllm_config": f"{_ENGINE}; model_config has what is known",
    "wait_for_completion": "generate and chat return when all prompts are complete",
    "wake_up": _SLEEP,
}
"""Members of LLM."""

_ASYNC = "several threads may call one LLM, and any OpenAI client can use `pdserve serve`"
NAMES: Mapping[str, str] = {
    "AsyncEngineArgs": _ASYNC,
    "AsyncLLMEngine": _ASYNC,
    "LLMEngine": "an LLM batches its prompts, also from several threads",
    "PoolingParams": "its fields are keywords of embed, encode and classify: dimensions, use_activation",
    "PromptType": "a prompt is a text, token ids, a TextPrompt or a TokensPrompt",
    "initialize_ray_cluster": "a ranktable describes a cluster, and LLM(cluster=URL) uses it",
}
"""Names of the package."""

KEYWORDS: Mapping[str, str] = {
    "concurrency_limit": "LLM(..., max_in_flight=...) limits the requests in flight",
    "lora_request": "adapters are not supported: merge them into the weights",
    "mm_processor_kwargs": "the model's own image processor is used",
    "pooling_params": "its fields are keywords: dimensions=..., use_activation=...",
    "tokenization_kwargs": "SamplingParams(truncate_prompt_tokens=...) truncates a prompt; else pass token ids",
}
"""Keywords of LLM's methods."""


def refuse(method: str, given: Mapping[str, Any]) -> None:
    """Accept vLLM's keywords that are None; raise NotImplementedError for other values, TypeError for unknown ones."""
    for name, value in given.items():
        if name not in KEYWORDS:
            raise TypeError(f"LLM.{method} has no keyword {name!r}")
        if value is not None:
            raise NotImplementedError(f"{name} is not supported: {KEYWORDS[name]}")
