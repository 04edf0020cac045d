"""Inputs that are read but not continued: texts or token ids to pool, and texts to score."""

import asyncio
from collections.abc import Sequence
from typing import Any

from scheduler.api.prompts import check_token_ids
from scheduler.tokenizer.truncation import truncate_prompt
from scheduler.tokens import Tokens
from wire.errors import InvalidRequest, PromptTooLong

Input = str | tuple[int, ...]


def read_inputs(value: Any, *, max_inputs: int, longest: int | None) -> tuple[Input, ...]:
    """Return the inputs of a string, a list of strings, a list of token ids or a list of such lists.

    Lists of more than `longest` ids are refused by their length, before they are iterated over.
    """
    lists = [value, *value[:max_inputs]] if isinstance(value, list) else []
    for ids in lists:
        if longest is not None and isinstance(ids, list) and len(ids) > longest and isinstance(ids[0], int):
            raise _too_long(len(ids), longest, "input")
    items = value if isinstance(value, list) and value and not _is_ids(value) else [value]
    _check_count(len(items), max_inputs, "input")
    if all(isinstance(item, str) for item in items):
        found: tuple[Input, ...] = tuple(items)
    elif all(_is_ids(item) for item in items):
        found = tuple(tuple(item) for item in items)
    else:
        raise InvalidRequest(
            "input must be a string, a list of strings, a list of token ids or a list of such lists, none empty",
            "input",
        )
    _check_none_empty(found, "input")
    return found


def read_texts(value: Any, param: str, *, max_inputs: int) -> tuple[str, ...]:
    """Return the texts given as a string or a list of strings."""
    items = value if isinstance(value, list) else [value]
    if not items or not all(isinstance(item, str) for item in items):
        raise InvalidRequest(f"{param} must be a string or a list of strings, none empty", param)
    _check_count(len(items), max_inputs, param)
    _check_none_empty(items, param)
    return tuple(items)


async def encode_inputs(
    inputs: Sequence[Input], tokens: Tokens, *, add_special_tokens: bool, keep: int | None, side: str = "left",
    param: str = "input",
) -> tuple[tuple[int, ...], ...]:  # fmt: skip
    """Return the ids of each input, truncated to `keep`. Raises InvalidRequest, PromptTooLong."""
    found = []
    for given in inputs:
        if isinstance(given, str):
            ids = await tokens.encode(given, add_special_tokens=add_special_tokens, param=param, bounded=keep is None)
        else:
            check_token_ids(given, tokens, param)
            ids = given
        found.append(fitting(truncate_prompt(ids, keep, room=tokens.max_model_len, side=side), tokens, param))
        await asyncio.sleep(0)  # yield to the event loop between texts
    return tuple(found)


def fitting(ids: tuple[int, ...], tokens: Tokens, param: str) -> tuple[int, ...]:
    """Return the ids if the model can process them. Raises InvalidRequest for none, PromptTooLong for too many."""
    if not ids:
        raise InvalidRequest(f"{param}: a text has no tokens", param)
    if len(ids) > tokens.max_model_len:
        raise _too_long(len(ids), tokens.max_model_len, param)
    return ids


def _too_long(count: int, longest: int, param: str) -> PromptTooLong:
    return PromptTooLong(
        f"This model's maximum context length is {longest} tokens; a text has {count}. Please reduce the length of the "
        "input prompt, or cut it to what fits with truncate_prompt_tokens: -1",
        param,
    )


def _check_count(count: int, maximum: int, param: str) -> None:
    if count > maximum:
        raise InvalidRequest(f"{param} has {count} texts, but the limit is {maximum} (--max-inputs)", param)


def _check_none_empty(items: Sequence[Input], param: str) -> None:
    for index, item in enumerate(items):
        if not item:
            raise InvalidRequest(f"{param}: text {index} is empty", param)


def _is_ids(value: Any) -> bool:
    """Return whether a value is a list of integers; True and False are not token ids."""
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
