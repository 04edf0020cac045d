"""What vLLM's LLM has and ours has not, each with its reason."""

from collections.abc import Mapping
from typing import Any

METHODS: Mapping[str, str] = {
    "apply_model": "the model may be in another process",
    "collective_rpc": "its engine may be in another process: nothing runs in it but requests",
    "enqueue": "generate takes all prompts at once, and several threads may call it",
    "enqueue_chat": "chat takes all conversations at once, and several threads may call it",
    "get_world_size": "tensor_parallel_size is what LLM(...) was given",
    "llm_engine": "there are get_tokenizer, get_metrics and get_default_sampling_params for what it is asked",
    "release_kv_cache_memory": "LLM(..., kv_cache_memory=...) says how much there is, and close() gives it back",
    "reset_mm_cache": "prompts are texts or token ids",
    "sleep": "close() gives all memory back, and LLM(...) loads the model again",
    "start_profile": "`pdserve bench engine` says where the time goes",
    "stop_profile": "`pdserve bench engine` says where the time goes",
    "wait_for_completion": "generate and chat return when all is complete",
    "wake_up": "close() gives all memory back, and LLM(...) loads the model again",
}
KEYWORDS: Mapping[str, str] = {
    "concurrency_limit": "LLM(..., max_in_flight=...) bounds what runs at once",
    "lora_request": "adapters are not supported: merge them into the weights",
    "mm_processor_kwargs": "prompts are texts or token ids",
    "pooling_params": "a vector is pooled as the model is trained to; dimensions=... shortens it",
    "tokenization_kwargs": "SamplingParams(truncate_prompt_tokens=...) cuts a prompt; for other tokens give their ids",
}


def refuse(method: str, given: Mapping[str, Any]) -> None:
    """Take vLLM's keywords that say nothing; raise NotImplementedError for one that does, TypeError for an unknown."""
    for name, value in given.items():
        if name not in KEYWORDS:
            raise TypeError(f"LLM.{method} has no keyword {name!r}")
        if value is not None:
            raise NotImplementedError(f"{name} is not supported: {KEYWORDS[name]}")
