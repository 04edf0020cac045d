"""Convert sampling parameters to the body of a text request. Pure."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pdserve.offline.sampling_params import NOT_SENT, SamplingParams
from pdserve.offline.structured_params import structured_body
from scheduler.model.generation_defaults import GUIDE_DEFAULTS

_ALWAYS = tuple(GUIDE_DEFAULTS)
"""Always sent, since a server may have other defaults."""
_DEFAULT = SamplingParams()
_CONVERTED = {
    "n", "max_tokens", "seed", "stop", "logit_bias", "repetition_detection", "structured_outputs", "guided_decoding",
    "logprobs",
}  # fmt: skip
_IF_CHANGED = tuple(
    field.name for field in dataclasses.fields(SamplingParams) if field.name not in {*_ALWAYS, *_CONVERTED, *NOT_SENT}
)


def sampling_body(params: SamplingParams, *, max_tokens: int | None, seed: int | None) -> dict[str, Any]:
    """Return the fields that texts and chats share, without log probabilities. Raises ValueError for invalid ones."""
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
