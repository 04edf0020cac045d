"""Before anything is computed, refuse prompts that do not fit, and limit outputs to the remaining context."""

from collections.abc import Mapping
from typing import Any

from pdserve.offline.http_api import HttpApi
from pdserve.offline.prompts import PromptInput
from pdserve.offline.sampling_params import SamplingParams
from wire.errors import InvalidRequest

_SPECIAL = 16  # special tokens that a tokenizer may add to a text


async def room_for(api: HttpApi, index: int, prompt: PromptInput, params: SamplingParams) -> int | None:
    """Return the max_tokens for a text or list of ids, None for the rest of the context.

    Only texts that may not fit are tokenised. Raises ValueError with the number `index` of the prompt.
    """
    max_tokens, maximum = params.max_tokens, api.max_model_len
    if prompt.token_ids is None:
        assert prompt.text is not None
        if (
            max_tokens is not None
            and params.bound_prompt
            and not prompt.images
            and _at_most(prompt.text) + max_tokens <= maximum
        ):
            return max_tokens
    elif len(prompt.token_ids) + (max_tokens or maximum) <= maximum:
        return max_tokens
    return _remaining_tokens(index, await _count(api, index, prompt, params), params, maximum)


async def room_after_chat(
    api: HttpApi, index: int, conversation: Mapping[str, Any], params: SamplingParams
) -> int | None:
    """Return the same for a conversation, rendering its template; None leaves the limit to the server."""
    num_tokens = (await _tokenize(api, index, conversation))["count"]
    left = _remaining_tokens(index, num_tokens, params, api.max_model_len)
    return None if params.max_tokens is None else left


async def token_ids(api: HttpApi, index: int, prompt: PromptInput) -> list[int]:
    """Return a prompt's token ids. Raises ValueError if the text cannot be tokenised."""
    if prompt.token_ids is not None:
        return list(prompt.token_ids)
    ids: list[int] = (await _tokenize(api, index, {"prompt": prompt.text}))["tokens"]
    return ids


async def _count(api: HttpApi, index: int, prompt: PromptInput, params: SamplingParams) -> int:
    """Return a prompt's number of tokens; max_model_len for a text too long to tokenise that will be truncated."""
    if prompt.token_ids is not None:
        return len(prompt.token_ids)
    try:
        body = {"prompt": prompt.text} | ({"multi_modal_data": {"image": prompt.images}} if prompt.images else {})
        return int((await _tokenize(api, index, body))["count"])
    except ValueError:
        if params.bound_prompt:
            raise
        return api.max_model_len


async def _tokenize(api: HttpApi, index: int, body: Mapping[str, Any]) -> Any:
    try:
        return await api.post("/tokenize", body)
    except InvalidRequest as error:
        raise ValueError(f"prompt {index}: {error}") from error


def _remaining_tokens(index: int, num_tokens: int, params: SamplingParams, maximum: int) -> int:
    keep = params.truncate_prompt_tokens
    if keep is not None:
        num_tokens = min(num_tokens, keep if keep > 0 else maximum - (params.max_tokens or 1))
    if num_tokens >= maximum:
        raise ValueError(
            f"prompt {index} has {num_tokens} tokens; the model's maximum context length is {maximum}, and the output "
            "needs at least one more token"
        )
    left = maximum - num_tokens
    return left if params.max_tokens is None else min(params.max_tokens, left)


def _at_most(text: str) -> int:
    """Return an upper bound on a text's tokens, one per byte. The server refuses texts that a normaliser expands."""
    return len(text.encode("utf-8", "surrogatepass")) + _SPECIAL
