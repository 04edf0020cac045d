"""What vLLM's offline classes have and ours have not, each with its reason."""

from collections.abc import Mapping
from typing import Any

_ENGINE = "the engine may be in another process, and is spoken to by requests alone"
_SLEEP = "close() gives all memory back, and LLM(...) loads the model again"
_QUEUE = "generate and chat take all prompts at once, and several threads may call them"
_RENDERED = "generate takes texts and token ids, and chat renders messages"
_WEIGHTS = "weights are those of the folder: LLM(...) loads another one"
_PROFILE = "`pdserve bench engine` says where the time goes"

MEMBERS: Mapping[str, str] = {
    "apply_model": _ENGINE,
    "classify": "models of one class score pairs, LLM.score; models of several classes are not supported",
    "collective_rpc": _ENGINE,
    "default_sampling_params": "get_default_sampling_params() returns them",
    "deprecate_legacy_api": "there is no legacy API here",
    "engine_class": _ENGINE,
    "enqueue": _QUEUE,
    "enqueue_chat": _QUEUE,
    "finish_weight_update": _WEIGHTS,
    "get_world_size": "tensor_parallel_size is what LLM(...) was given",
    "init_weight_transfer_engine": _WEIGHTS,
    "input_processor": _RENDERED,
    "llm_engine": f"{_ENGINE}; model_config, get_tokenizer() and get_metrics() say what is known of it",
    "preprocess_chat": _RENDERED,
    "preprocess_cmpl": _RENDERED,
    "release_kv_cache_memory": "LLM(..., kv_cache_memory=...) says how much there is, and close() gives it back",
    "renderer": _RENDERED,
    "request_counter": "a request's id is RequestOutput.request_id",
    "reset_mm_cache": "prompts are texts or token ids",
    "reward": "models of rewards are not supported",
    "sleep": _SLEEP,
    "start_profile": _PROFILE,
    "start_weight_update": _WEIGHTS,
    "stop_profile": _PROFILE,
    "supported_tasks": "generate, embed and score say of themselves where a model lacks them",
    "update_weights": _WEIGHTS,
    "vllm_config": f"{_ENGINE}; model_config says what is known of it",
    "wait_for_completion": "generate and chat return when all is complete",
    "wake_up": _SLEEP,
}
"""Of LLM."""

_ASYNC = "several threads may call one LLM, and `pdserve serve` is asked by any OpenAI client"
NAMES: Mapping[str, str] = {
    "AsyncEngineArgs": _ASYNC,
    "AsyncLLMEngine": _ASYNC,
    "ClassificationOutput": MEMBERS["classify"],
    "ClassificationRequestOutput": MEMBERS["classify"],
    "LLMEngine": "an LLM batches what it is given, from several threads too",
    "PoolingParams": "a vector is pooled as the model is trained to; embed(dimensions=...) shortens it",
    "PromptType": "a prompt is a text, token ids, a TextPrompt or a TokensPrompt",
    "initialize_ray_cluster": "a cluster is described by a ranktable, and LLM(cluster=URL) asks it",
}
"""Of the package."""

KEYWORDS: Mapping[str, str] = {
    "concurrency_limit": "LLM(..., max_in_flight=...) bounds what runs at once",
    "lora_request": "adapters are not supported: merge them into the weights",
    "mm_processor_kwargs": "prompts are texts or token ids",
    "pooling_params": "a vector is pooled as the model is trained to; dimensions=... shortens it",
    "tokenization_kwargs": "SamplingParams(truncate_prompt_tokens=...) cuts a prompt; for other tokens give their ids",
}
"""Of LLM's methods."""


def refuse(method: str, given: Mapping[str, Any]) -> None:
    """Take vLLM's keywords that say nothing; raise NotImplementedError for one that does, TypeError for an unknown."""
    for name, value in given.items():
        if name not in KEYWORDS:
            raise TypeError(f"LLM.{method} has no keyword {name!r}")
        if value is not None:
            raise NotImplementedError(f"{name} is not supported: {KEYWORDS[name]}")
