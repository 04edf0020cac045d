"""The thinking before an answer: its limits for the engine, and how the text of a chat is separated from it."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from scheduler.app_context import AppContext
from scheduler.reasoning.formats import REASONING_FORMATS, ReasoningFormat, ReasoningState
from scheduler.reasoning.options import PromptEnd, ReasoningOptions, end_of_prompt, is_switched_off
from scheduler.templates.chat_options import ChatOptions
from scheduler.tokens import Tokens
from wire.errors import InvalidRequest
from wire.types import SamplingParams, Thinking

_BUDGET = "thinking_token_budget"


@dataclass(frozen=True, slots=True)
class ChatStart:
    """How a chat's prompt ends; `is_off`: the template's variables turn the answer's thinking off."""

    end: PromptEnd
    is_off: bool


async def chat_start(
    context: AppContext, messages: Sequence[Mapping[str, Any]], options: ChatOptions, prompt: Sequence[int]
) -> ChatStart | None:
    """Return the start of a chat's answer: how its prompt ends. None without --reasoning-parser.

    Only what the template adds after the messages counts: a marker in a message is text. Where the answer continues
    the last message, that message's markers count; if it has none, the answer continues content.
    """
    name = context.config.options.reasoning_parser
    if name is None:
        return None
    text_format, tokens = REASONING_FORMATS[name], context.tokens
    end = _prompt_end(text_format, tokens, prompt)
    if options.continue_final_message:
        if end.state is None or not _mentions(text_format, messages[-1]):
            end = PromptEnd(ReasoningState.CONTENT)
    elif end.state is not None and _mentions(text_format, (messages, options.tools, options.documents)):
        without = await tokens.encode_chat(messages, dataclasses.replace(options, add_generation_prompt=False))
        if without != prompt:  # else the template ignores the flag
            num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, without, strict=False)))
            end = _prompt_end(text_format, tokens, prompt[num_same:])
    return ChatStart(end, is_switched_off(text_format, {**tokens.default_kwargs, **options.template_kwargs}))


def read_thinking(
    context: AppContext, chat: ChatStart | None, prompts: Iterable[Sequence[int]], params: SamplingParams,
    budget: int | None,
) -> Thinking | None:  # fmt: skip
    """Return the rule for the thinking, if a grammar applies after it or a `budget` limits it (-1: no budget).

    `chat` is None for prompts that are not chats: their own text shows whether they think. Raises InvalidRequest.
    """
    budget = None if budget == -1 else budget
    name, is_bound = context.config.options.reasoning_parser, params.structured is not None
    if budget is None and not (is_bound and name is not None):
        return None
    if name is None:
        raise InvalidRequest(f"{_BUDGET} needs --reasoning-parser, the format in which the model thinks", _BUDGET)
    text_format, tokens = REASONING_FORMATS[name], context.tokens
    if not can_limit_thinking(context):
        if budget is None:
            return None
        raise InvalidRequest(
            f"{_BUDGET} is not possible: in this model's tokenizer the markers of {name} are not single tokens", _BUDGET
        )
    found = {_thinking(text_format, tokens, chat, prompt, budget, is_bound=is_bound) for prompt in prompts}
    if len(found) > 1:
        raise InvalidRequest("the prompts end in different states of thinking: send one per request", "prompt")
    (thinking,) = found
    if thinking is not None:
        _check_end(thinking, params)
    return thinking


def can_limit_thinking(context: AppContext) -> bool:
    """Return whether --reasoning-parser names a format whose markers are single tokens of this model."""
    name = context.config.options.reasoning_parser
    text_format = None if name is None else REASONING_FORMATS[name]
    return text_format is not None and all(
        _ids(markers, context.tokens) for markers in (text_format.starts, text_format.ends)
    )


def reasoning_options(
    context: AppContext, chat: ChatStart | None, params: SamplingParams, *, include: bool, has_calls: bool,
    separate: bool,
) -> ReasoningOptions | None:  # fmt: skip
    """Return how the text is separated, None without --reasoning-parser.

    `include`: the client gets the thinking. `has_calls`: the text is parsed for calls in the model's format.
    `separate`: the thinking is not part of the content.
    """
    name = context.config.options.reasoning_parser
    if name is None or chat is None:
        return None
    text_format = REASONING_FORMATS[name]
    options = ReasoningOptions(text_format, chat.end.state or text_format.begin, has_calls, include, separate)
    if chat.is_off or (params.structured is not None and params.thinking is None):
        return options.without_thinking()
    return options if params.structured is None else options.before_form()


def _thinking(
    text_format: ReasoningFormat, tokens: Tokens, chat: ChatStart | None, prompt: Sequence[int], budget: int | None,
    *, is_bound: bool,
) -> Thinking | None:  # fmt: skip
    end = _prompt_end(text_format, tokens, prompt) if chat is None else chat.end
    state = end.state or ReasoningState.CONTENT
    if chat is not None and end.state is None and not chat.is_off:
        state = text_format.begin
    may_begin = chat is not None and end.state is None and state is text_format.begin
    if is_bound and state is not ReasoningState.THINKING and not may_begin:
        return None
    (start,), (stop,) = _ids(text_format.starts[:1], tokens), _ids(text_format.ends[:1], tokens)
    return Thinking(start, stop, state is ReasoningState.THINKING, end.num_tokens, budget)


def _prompt_end(text_format: ReasoningFormat, tokens: Tokens, prompt: Sequence[int]) -> PromptEnd:
    return end_of_prompt(prompt, _ids(text_format.starts, tokens), _ids(text_format.ends, tokens), tokens.special_ids)


def _mentions(text_format: ReasoningFormat, value: object) -> bool:
    text = repr(value)
    return any(marker in text for marker in (*text_format.starts, *text_format.ends))


def _ids(markers: Sequence[str], tokens: Tokens) -> list[int]:
    return [token_id for marker in markers if (token_id := tokens.token_id(marker)) is not None]


def _check_end(thinking: Thinking, params: SamplingParams) -> None:
    """Refuse parameters that would never let the thinking end."""
    end = thinking.end_token_id
    if params.beam_search is not None:
        raise InvalidRequest(f"{_BUDGET} conflicts with use_beam_search: leave one out", "use_beam_search")
    if params.allowed_token_ids and end not in params.allowed_token_ids:
        raise InvalidRequest(f"allowed_token_ids lacks {end}, the token that ends the thinking", "allowed_token_ids")
    is_forced = thinking.budget is not None  # at the budget, even where a longer bad word or min_tokens bans it
    if any(word[-1] == end for word in params.bad_words if is_forced or len(word) == 1):
        raise InvalidRequest(f"bad_words has the token that ends the thinking, {end}", "bad_words")
    if is_forced and params.min_tokens and end in params.stop_token_ids:
        raise InvalidRequest(
            f"stop_token_ids has {end}, the token that ends the thinking: leave min_tokens or {_BUDGET} out",
            "stop_token_ids",
        )
