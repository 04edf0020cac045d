"""truncation auto: drop the oldest messages of a conversation until it fits the model's context."""

from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.app_context import AppContext
from scheduler.templates.chat_options import ChatOptions
from wire.errors import PromptTooLong

_ANSWER_SHARE = 8
"""A request without a limit reserves one eighth of the context for its answer."""


async def drop_oldest(
    context: AppContext, messages: Sequence[Mapping[str, Any]], options: ChatOptions, max_tokens: int | None
) -> Sequence[Mapping[str, Any]]:
    """Return the conversation without its oldest messages, as few as possible; system messages at its start stay.

    If even the last message does not fit, it stays: the check of the prompt refuses it. Raises a PdserveError.
    """
    model_len = context.tokens.max_model_len
    room = max(1, model_len - (max_tokens or max(1, model_len // _ANSWER_SHARE)))
    num_kept = next((at for at, one in enumerate(messages) if one["role"] != "system"), len(messages))
    starts = _starts(messages, num_kept)
    low = middle = 0  # most conversations fit as they are
    high = len(starts) - 1
    while low < high:  # the first that fits is in [low, high], or none does
        if await _num_tokens(context, [*messages[:num_kept], *messages[starts[middle] :]], options) <= room:
            high = middle
        else:
            low = middle + 1
        middle = (low + high) // 2
    return [*messages[:num_kept], *messages[starts[low] :]]


def _starts(messages: Sequence[Mapping[str, Any]], first: int) -> list[int]:
    """Return where the rest may begin: at a user message, and after the last of these also at an assistant message."""
    last_user = max((at for at, one in enumerate(messages) if one["role"] == "user"), default=-1)
    after = [(at, one["role"]) for at, one in enumerate(messages) if at > first]
    return [first, *(at for at, role in after if role == "user" or (role == "assistant" and at > last_user))]


async def _num_tokens(context: AppContext, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> float:
    try:
        return len(await context.tokens.encode_chat(messages, options))
    except PromptTooLong:
        return float("inf")
