"""A chat's reasoning: how the text of its answer is separated into thinking and content."""

from collections.abc import Sequence
from typing import Any

from scheduler.app_context import AppContext
from scheduler.reasoning.formats import REASONING_FORMATS, ReasoningState
from scheduler.reasoning.options import ReasoningOptions, end_of_prompt, is_switched_off
from scheduler.templates.chat_options import ChatOptions
from scheduler.tokens import Tokens


def reasoning_options(
    context: AppContext, chat: ChatOptions, prompt: Sequence[int], *, include: bool, is_constrained: bool,
    has_calls: bool,
) -> ReasoningOptions | None:  # fmt: skip
    """Return how the text is separated, None without --reasoning-parser.

    `include`: the client gets the thinking. `is_constrained`: a grammar allows no thinking. `has_calls`: the text is
    parsed for calls in the model's format.
    """
    name = context.config.options.reasoning_parser
    if name is None:
        return None
    text_format, tokens = REASONING_FORMATS[name], context.tokens
    options = ReasoningOptions(text_format, text_format.begin, has_calls, include)
    starts, ends = _ids(text_format.starts, tokens), _ids(text_format.ends, tokens)
    state = end_of_prompt(prompt, starts, ends, tokens.special_ids).state
    if is_constrained or is_switched_off(text_format, {**tokens.default_kwargs, **chat.template_kwargs}):
        return options.without_thinking()
    if state is None or (state is ReasoningState.CONTENT and text_format.begin is ReasoningState.UNDECIDED):
        return options
    return ReasoningOptions(text_format, state, has_calls, include)


def _ids(markers: Sequence[str], tokens: Tokens) -> list[int]:
    found: list[Any] = [tokens.token_id(marker) for marker in markers]
    return [token_id for token_id in found if token_id is not None]
