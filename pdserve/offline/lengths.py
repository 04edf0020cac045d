"""Refuse prompts that do not fit before anything is computed, and cut the outputs that would not fit behind theirs."""

from collections.abc import Mapping
from typing import Any

from pdserve.offline.http_surface import HttpSurface
from pdserve.offline.prompts import PromptInput
from pdserve.offline.sampling_params import SamplingParams
from wire.errors import InvalidRequest

_SPECIAL = 16  # tokens that a tokenizer may put around a text


async def room_for(surface: HttpSurface, index: int, prompt: PromptInput, params: SamplingParams) -> int | None:
    """Return how many tokens a text or list of ids may be continued by, None for all that is left.

    Only a text that may not fit is tokenised for it. Raises ValueError that names prompt `index`.
    """
    asked, most = params.max_tokens, surface.max_model_len
    if prompt.token_ids is None:
        assert prompt.text is not None
        if asked is not None and params.bound_prompt and _at_most(prompt.text) + asked <= most:
            return asked
    elif len(prompt.token_ids) + (asked or most) <= most:
        return asked
    return _left(index, await _count(surface, index, prompt, params), params, most)


async def room_behind_chat(
    surface: HttpSurface, index: int, conversation: Mapping[str, Any], params: SamplingParams
) -> int | None:
    """Return the same of a conversation, whose template is rendered for it; None leaves it to the server."""
    num_tokens = (await _tokenize(surface, index, conversation))["count"]
    left = _left(index, num_tokens, params, surface.max_model_len)
    return None if params.max_tokens is None else left


async def token_ids(surface: HttpSurface, index: int, prompt: PromptInput) -> list[int]:
    """Return a prompt's token ids. Raises ValueError where the text cannot be tokenised."""
    if prompt.token_ids is not None:
        return list(prompt.token_ids)
    ids: list[int] = (await _tokenize(surface, index, {"prompt": prompt.text}))["tokens"]
    return ids


async def _count(surface: HttpSurface, index: int, prompt: PromptInput, params: SamplingParams) -> int:
    """Return how many tokens a prompt has; of a text that is to be cut and too long to be tokenised, the most."""
    if prompt.token_ids is not None:
        return len(prompt.token_ids)
    try:
        return int((await _tokenize(surface, index, {"prompt": prompt.text}))["count"])
    except ValueError:
        if params.bound_prompt:
            raise
        return surface.max_model_len


async def _tokenize(surface: HttpSurface, index: int, body: Mapping[str, Any]) -> Any:
    try:
        return await surface.post("/tokenize", body)
    except InvalidRequest as error:
        raise ValueError(f"prompt {index}: {error}") from error


def _left(index: int, num_tokens: int, params: SamplingParams, most: int) -> int:
    keep = params.truncate_prompt_tokens
    if keep is not None:
        num_tokens = min(num_tokens, keep if keep > 0 else most - (params.max_tokens or 1))
    if num_tokens >= most:
        raise ValueError(
            f"prompt {index} has {num_tokens} tokens; the model's maximum context length is {most}, and the output "
            "needs at least one more"
        )
    left = most - num_tokens
    return left if params.max_tokens is None else min(params.max_tokens, left)


def _at_most(text: str) -> int:
    """A token is one byte of text at least, but for the few that a normaliser makes: those the server refuses."""
    return len(text.encode("utf-8", "surrogatepass")) + _SPECIAL
