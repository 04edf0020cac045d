"""Convert sampling parameters to the body of a text request. Pure."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pdserve.offline.sampling_params import SamplingParams
from pdserve.offline.structured_params import structured_body

_ALWAYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Always sent, since a server may have other defaults."""
_DEFAULT = SamplingParams()
_IF_CHANGED = (
    "best_of", "presence_penalty", "frequency_penalty", "use_beam_search", "length_penalty", "early_stopping",
    "stop_token_ids", "bad_words", "ignore_eos", "min_tokens", "prompt_logprobs", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "truncate_prompt_tokens", "allowed_token_ids",
    "logprob_token_ids",
)  # fmt: skip


def sampling_body(params: SamplingParams, *, max_tokens: int | None, seed: int | None) -> dict[str, Any]:
    """Return the fields that texts and chats share, without log probabilities. Raises ValueError for wrong ones."""
    params.check()
    body: dict[str, Any] = {name: getattr(params, name) for name in _ALWAYS}
    body |= {"n": params.n, "return_token_ids": True}
    body |= {name: value for name in _IF_CHANGED if (value := getattr(params, name)) != getattr(_DEFAULT, name)}
    body |= {name: value for name, value in (("max_tokens", max_tokens), ("seed", seed)) if value is not None}
    if params.stops:
        body["stop"] = params.stops
    if params.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
    if params.repetition_detection is not None:
        rule = params.repetition_detection
        body["repetition_detection"] = dict(rule) if isinstance(rule, Mapping) else dataclasses.asdict(rule)
    structured = structured_body(params.structured_outputs or params.guided_decoding)
    return body if structured is None else body | {"structured_outputs": structured}


def completion_logprobs(params: SamplingParams) -> dict[str, Any]:
    """Return the log probability field of a completion request."""
    count = _num_logprobs(params)
    return {} if count is None else {"logprobs": count}


def chat_logprobs(params: SamplingParams) -> dict[str, Any]:
    """Return the log probability fields of a chat request."""
    count = _num_logprobs(params)
    return {} if count is None else {"logprobs": True, "top_logprobs": count}


def _num_logprobs(params: SamplingParams) -> int | None:
    """Return the number of log probabilities per position; 0 with logprob_token_ids alone."""
    return 0 if params.logprobs is None and params.logprob_token_ids else params.logprobs
