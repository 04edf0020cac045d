"""Options for converting output tokens to text, and the pieces of text that are sent."""

from dataclasses import dataclass, field

from scheduler.reasoning.options import ReasoningOptions
from scheduler.tools.call_options import CallOptions
from scheduler.tools.deltas import CallDelta
from wire.cheap_dataclass import cheap_dataclass
from wire.types import TokenOutput


@cheap_dataclass(frozen=True, slots=True)
class TextOptions:
    """How output tokens become text. `silent_stop_ids` (EOS) finish a choice without being its stop_reason.

    `echo`, if given, has the text of each prompt, which is put before each of its choices. With `prompt_only` there
    is nothing else: the one token computed after the prompt is neither sent nor counted. With `calls` the text is
    parsed for tool calls, with `reasoning` for thinking; `kept_special_ids` are the markers of both, which skipping
    leaves in the text.
    """

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    min_tokens: int = 0
    silent_stop_ids: frozenset[int] = field(default_factory=frozenset)
    continues_prompt: bool = False
    echo: tuple[str, ...] = ()
    prompt_only: bool = False
    calls: CallOptions | None = None
    reasoning: ReasoningOptions | None = None
    kept_special_ids: frozenset[int] = field(default_factory=frozenset)


@dataclass(slots=True)  # not frozen, for the reason given at TokenLogprobs
class TextPiece:
    """New text of choice `index` (prompt * n + number among its choices); `finish_reason` is set on its last piece.

    `tokens` are those since the choice's previous piece: their text may still be held back. `cumulative_logprob` sums
    the log probabilities of all the choice's tokens so far, None if they are unknown. `reasoning` is before
    the text, `calls` follow it.
    """

    index: int
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    tokens: tuple[TokenOutput, ...] = ()
    cumulative_logprob: float | None = None
    calls: tuple[CallDelta, ...] = ()
    reasoning: str = ""
