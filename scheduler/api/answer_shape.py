"""The format of one API's answers, complete and streamed."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from scheduler.api.sse import StreamFormat
from scheduler.text.pieces import TextPiece
from scheduler.text_output import TextOutput
from scheduler.tools.deltas import CallDelta
from wire.cheap_dataclass import cheap_dataclass
from wire.types import TokenLogprobs

Usage = dict[str, Any]
ANSWER_NULLS = dict.fromkeys(
    ("service_tier", "system_fingerprint", "kv_transfer_params", "ec_transfer_params", "metrics")
)  # fmt: skip
"""Keys of a complete answer that vLLM sends as null when unused, and that its clients read."""
CHOICE_NULLS = dict.fromkeys(("token_ids", "routed_experts", "weight_versions"))
"""Such keys of each choice."""


@cheap_dataclass(frozen=True, slots=True)
class CompleteChoice:
    """One complete choice; `logprobs` are lists by name in the API's format, None if not requested.

    Each of `calls` has a name, an id and all arguments. `blocks` is the order of the calls, `text` and `reasoning`:
    the type (text, thinking or tool_use) and the text of each block; the text of a call is empty.
    """

    index: int
    text: str
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: Mapping[str, Any] | None = None
    token_ids: tuple[int, ...] = ()
    calls: tuple[CallDelta, ...] = ()
    reasoning: str = ""
    blocks: tuple[tuple[str, str], ...] = ()


@cheap_dataclass(frozen=True, slots=True)
class PromptReport:
    """A prompt's ids and log probabilities, as far as requested."""

    token_ids: tuple[int, ...]
    logprobs: Sequence[TokenLogprobs | None]


class AnswerShape(Protocol):
    """One request's answer in the format of one API. Streams send `opening` before a choice's first event."""

    @property
    def stream_format(self) -> StreamFormat:
        """How the events of its streams are written."""
        ...

    def opening(self, index: int, prompt: PromptReport, usage: Usage | None) -> bytes:
        """Return the event that opens a choice's stream; empty if the API has none."""
        ...

    def event(self, piece: TextPiece, prompt: PromptReport, usage: Usage | None) -> bytes:
        """Return the event that carries `piece`, with `usage` if the client requested it in every chunk."""
        ...

    def logprobs(self, piece: TextPiece, prompt: PromptReport) -> dict[str, list[Any]] | None:
        """Return the log probabilities of `piece`, None if not requested. Called once for each piece, in order."""
        ...

    def usage_chunk(self, usage: Usage) -> dict[str, Any] | None:
        """Return the chunk with the token counts and no choice; None if the API has none."""
        ...

    def whole(self, choices: list[CompleteChoice], prompts: Sequence[PromptReport], usage: Usage) -> dict[str, Any]:
        """Return the complete answer."""
        ...


def prompt_reports(output: TextOutput) -> list[PromptReport]:
    """Return the reports of a running request's prompts, which are complete before their pieces."""
    return [PromptReport(ids, scored) for ids, scored in zip(output.prompts, output.scored, strict=True)]
