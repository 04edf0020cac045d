"""The formats in which models write their thinking, by their names, which are vLLM's."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class ReasoningState(Enum):
    """What the next text is; UNDECIDED: thinking if the answer begins with a marker, otherwise content."""

    THINKING = "thinking"
    UNDECIDED = "undecided"
    CONTENT = "content"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers before and after the thinking; the first of each is the one that models are trained on.

    `in_content` are the markers that count in content: one of `starts` begins more thinking, one of `ends` is left out.
    `calls` begin a tool call, and so end the thinking. `switches` are variables of the chat template that turn thinking
    off, or on where `is_on` is false. `strips`: white space at the end of the thinking is left out.
    `tokens` are the special tokens of which longer markers are made.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    begin: ReasoningState = ReasoningState.THINKING
    in_content: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    is_on: bool = True
    strips: bool = False
    tokens: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that must reach the parser even if they are special tokens."""
        return (*self.starts, *self.ends, *self.tokens)


_START, _END = ("<think>",), ("</think>",)
_CALL = ("<tool_call>",)
_MISTRAL = ("[THINK]", "[/THINK]")
_ANALYSIS = ("<|channel|>analysis<|message|>",)

REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType({
    "deepseek_r1": ReasoningFormat(_START, _END),
    "deepseek_v3": ReasoningFormat(_START, _END, switches=("thinking", "enable_thinking"), is_on=False),
    "qwen3": ReasoningFormat(_START, _END, in_content=_END, calls=_CALL, switches=("enable_thinking",)),
    "glm45": ReasoningFormat(
        _START, _END, in_content=(*_START, *_END), calls=_CALL, switches=("thinking", "enable_thinking"), strips=True
    ),
    "mistral": ReasoningFormat(
        _MISTRAL[:1], _MISTRAL[1:], ReasoningState.CONTENT, in_content=_MISTRAL, calls=("[TOOL_CALLS]",), strips=True
    ),
    "openai_gptoss": ReasoningFormat(  # its content is in frames, which the parser of its tool calls reads
        _ANALYSIS, ("<|end|>",), ReasoningState.CONTENT, in_content=_ANALYSIS, tokens=("<|channel|>", "<|message|>")
    ),
    "granite": ReasoningFormat(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        ReasoningState.UNDECIDED,
    ),
})  # fmt: skip
