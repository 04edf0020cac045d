"""What the answers of one surface look like, whole and in pieces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from scheduler.stream import TextStream
from scheduler.text.pieces import TextPiece
from wire.types import TokenLogprobs

Usage = dict[str, Any]
ANSWER_NULLS = dict.fromkeys(
    ("service_tier", "system_fingerprint", "kv_transfer_params", "ec_transfer_params", "metrics")
)  # fmt: skip
"""Keys of a whole answer that vLLM sends as null where it has nothing for them, and its clients read."""
CHOICE_NULLS = dict.fromkeys(("token_ids", "routed_experts", "weight_versions"))
"""Those of each choice."""


@dataclass(frozen=True, slots=True)
class Ended:
    """One whole choice; `logprobs` are lists by name as its surface tells them, None where nobody asked."""

    index: int
    text: str
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: Mapping[str, Any] | None = None
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptReport:
    """A prompt's ids and how likely they were, as far as that was asked."""

    token_ids: tuple[int, ...]
    logprobs: Sequence[TokenLogprobs | None]


class AnswerShape(Protocol):
    """One request's answer in the form of one surface. Streams take `opening` before a choice's first event."""

    def opening(self, index: int, prompt: PromptReport, usage: Usage | None) -> bytes:
        """Return the event that opens a choice's stream; empty where the surface has none."""
        ...

    def event(self, piece: TextPiece, prompt: PromptReport, usage: Usage | None) -> bytes:
        """Return the event that carries `piece`, with `usage` where the client asked for it every time."""
        ...

    def logprobs(self, piece: TextPiece, prompt: PromptReport) -> dict[str, list[Any]] | None:
        """Return what is told of the tokens of `piece`, each piece once and in order; None where nobody asked."""
        ...

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """Return the chunk that carries no choice but the token counts."""
        ...

    def whole(self, choices: list[Ended], prompts: Sequence[PromptReport], usage: Usage) -> dict[str, Any]:
        """Return the whole answer."""
        ...


def prompt_told(output: TextStream, prompt: int) -> PromptReport:
    """Return what is known of one prompt of a running request."""
    return PromptReport(output.prompt_ids(prompt), output.prompt_logprobs[prompt])
