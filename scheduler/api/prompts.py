"""Read `prompt` in its four forms."""

from typing import Any

from scheduler.tokens import Tokens
from wire.errors import InvalidRequest, PromptTooLong

Prompt = str | tuple[int, ...]


def read_prompts(value: Any, *, max_prompts: int, max_model_len: int | None) -> tuple[Prompt, ...]:
    """Return the prompts of a string, a list of strings, a list of token ids or a list of such lists.

    Without `max_model_len` a list of ids may have any length: it is truncated later.
    """
    if max_model_len is not None:
        _check_sizes(value, max_prompts, max_model_len)
    if isinstance(value, str):
        prompts: tuple[Prompt, ...] = (value,)
    elif _is_list_of(value, str):
        prompts = tuple(value)
    elif _is_list_of(value, int):
        prompts = (tuple(value),)
    elif _is_list_of(value, list) and all(not item or _is_list_of(item, int) for item in value):
        prompts = tuple(tuple(item) for item in value)
    else:
        raise InvalidRequest(
            "prompt must be a string, a list of strings, a list of token ids or a list of such lists, none empty",
            "prompt",
        )
    if len(prompts) > max_prompts:
        raise InvalidRequest(
            f"the request has {len(prompts)} prompts, but the limit is {max_prompts} (--max-prompts)", "prompt"
        )
    for prompt in prompts:
        if not prompt:
            raise InvalidRequest("the prompt must not be empty", "prompt")
    return prompts


def _check_sizes(value: Any, max_prompts: int, max_model_len: int) -> None:
    """Refuse huge lists by their length, before they are iterated over."""
    lists = [value, *value[:max_prompts]] if isinstance(value, list) else []
    longest = max((len(item) for item in lists if isinstance(item, list)), default=0)
    if longest > max(max_model_len, max_prompts):
        raise PromptTooLong(
            f"This model's maximum context length is {max_model_len} tokens; the prompt has {longest}", "prompt"
        )


async def encode_prompt(
    prompt: Prompt, tokens: Tokens, *, add_special_tokens: bool, bounded: bool = True
) -> tuple[int, ...]:
    """Return the prompt's token ids. Raises InvalidRequest for an id outside the vocabulary.

    A text that is not `bounded` may exceed the model's length: it is truncated later.
    """
    if isinstance(prompt, str):
        ids = await tokens.encode(prompt, add_special_tokens=add_special_tokens, bounded=bounded)
        if not ids:
            raise InvalidRequest("the prompt has no tokens", "prompt")
        return ids
    check_token_ids(prompt, tokens, "prompt")
    return tokens.shared_ids.of(prompt)


def check_token_ids(token_ids: tuple[int, ...], tokens: Tokens, param: str) -> None:
    """Raise InvalidRequest for an id outside the vocabulary."""
    if min(token_ids) < 0 or max(token_ids) >= tokens.vocab_size:
        wrong = next(item for item in token_ids if not 0 <= item < tokens.vocab_size)
        raise InvalidRequest(
            f"{param}: token id {wrong} is out of vocabulary: ids are 0..{tokens.vocab_size - 1}", param
        )


def _is_list_of(value: Any, kind: type) -> bool:
    """Return whether a value is a non-empty list of exactly `kind`; True and False are not token ids."""
    return isinstance(value, list) and bool(value) and all(type(item) is kind for item in value)
