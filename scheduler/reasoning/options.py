"""How one request's text is separated into thinking and content, and what its prompt ends with. Pure."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler.reasoning.formats import ReasoningFormat, ReasoningState
from scheduler.reasoning.parser import ReasoningParser


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """The format, and the state in which an answer begins. With `has_calls` a tool call ends the thinking.

    `include`: the client gets the thinking, otherwise neither its text nor its tokens. `separate`: in its own field,
    and not within the content, where it would keep its markers.
    """

    text_format: ReasoningFormat
    begin: ReasoningState
    has_calls: bool = False
    include: bool = True
    separate: bool = True

    def make_parser(self) -> ReasoningParser:
        """Return a parser for one choice."""
        keeps_all = self.include and not self.separate
        return ReasoningParser(self.text_format, self.begin, has_calls=self.has_calls, keeps_all=keeps_all)

    def without_thinking(self) -> "ReasoningOptions":
        """Return the options for answers that are all content, whatever they contain."""
        plain = dataclasses.replace(self.text_format, in_content=())
        return dataclasses.replace(self, text_format=plain, begin=ReasoningState.CONTENT)

    def before_form(self) -> "ReasoningOptions":
        """Return the options for answers whose content is structured: no marker counts in it."""
        plain = dataclasses.replace(self.text_format, in_content=())
        begin = ReasoningState.UNDECIDED if self.begin is ReasoningState.CONTENT else self.begin
        return dataclasses.replace(self, text_format=plain, begin=begin, has_calls=False)


def is_switched_off(text_format: ReasoningFormat, variables: Mapping[str, Any]) -> bool:
    """Return whether the variables of the chat template turn the thinking off."""
    given = [bool(variables[name]) for name in text_format.switches if variables.get(name) is not None]
    return not (any(given) if given else text_format.is_on)


@dataclass(frozen=True, slots=True)
class PromptEnd:
    """What a prompt ends with: open thinking, `num_tokens` long so far, or closed thinking; `state` None: neither."""

    state: ReasoningState | None = None
    num_tokens: int = 0


def end_of_prompt(
    prompt: Sequence[int], starts: Collection[int], ends: Collection[int], special_ids: Collection[int]
) -> PromptEnd:
    """Return what the last marker after the last special token says: a chat's turns are between special tokens."""
    for num_tokens, token_id in enumerate(reversed(prompt)):
        if token_id in starts:
            return PromptEnd(ReasoningState.THINKING, num_tokens)
        if token_id in ends:
            return PromptEnd(ReasoningState.CONTENT)
        if token_id in special_ids:
            break
    return PromptEnd()
