"""Collects the choices of a non-streamed answer as they arrive; log probabilities are serialised at once.

As Python objects they would take five times the memory of the answer, and would all be serialised at the end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from scheduler.api.answer_options import AnswerOptions
from scheduler.api.answer_shape import AnswerShape, CompleteChoice, PromptReport
from scheduler.text.pieces import TextPiece
from scheduler.tools.deltas import CallDelta, joined
from wire.errors import InvalidRequest

_TOKEN_ID_BYTES = 7


class ChoiceCollector:
    """Collects the pieces of one request for `shape`; an answer above `max_bytes` fails."""

    def __init__(
        self, shape: AnswerShape, options: AnswerOptions, prompts: Sequence[PromptReport], max_bytes: int
    ) -> None:
        self._shape = shape
        self._prompts = prompts
        self._n = options.n
        self._token_ids = options.token_ids
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._choices: dict[int, _Choice] = {}

    def add(self, piece: TextPiece) -> None:
        """Add a piece. Raises InvalidRequest when the answer exceeds the limit."""
        choice = self._choices.get(piece.index)
        if choice is None:
            choice = self._choices[piece.index] = _Choice(piece.index)
        logprobs = self._shape.logprobs(piece, self._prompts[piece.index // self._n])
        self._num_bytes += choice.add(piece, logprobs, token_ids=self._token_ids)
        if self._num_bytes > self._max_bytes:
            raise InvalidRequest(
                f"the answer is larger than {self._max_bytes} bytes (--max-answer-bytes): request a stream, or "
                "fewer tokens, choices or log probabilities"
            )

    def choices(self) -> list[CompleteChoice]:
        """Return the whole choices in their order."""
        return [self._choices[index].complete() for index in sorted(self._choices)]


@dataclass(slots=True)
class _Choice:
    """One choice so far: `blocks` has types and texts, `lists` each log probability list as pieces of JSON."""

    index: int
    blocks: list[tuple[str, list[str]]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    lists: dict[str, list[bytes]] = field(default_factory=dict)
    is_scored: bool = False
    last: TextPiece | None = None
    calls: list[CallDelta] = field(default_factory=list)

    def add(self, piece: TextPiece, logprobs: Mapping[str, Sequence[Any]] | None, *, token_ids: bool) -> int:
        """Add a piece; return roughly how many bytes it adds to the answer."""
        ids = [token.token_id for token in piece.tokens if token.token_id is not None] if token_ids else []
        self.last = piece
        self.token_ids += ids
        added = _TOKEN_ID_BYTES * len(ids)
        for kind, text in (("thinking", piece.reasoning), ("text", piece.text)):
            if text:
                if not self.blocks or self.blocks[-1][0] != kind:
                    self.blocks.append((kind, []))
                self.blocks[-1][1].append(text)
                added += len(text.encode("utf-8", "replace"))
        if piece.calls:
            self.calls += piece.calls
            self.blocks += [("tool_use", []) for delta in piece.calls if delta.name is not None]
            added += sum(len(delta.arguments.encode("utf-8", "replace")) for delta in piece.calls)
        if logprobs is None:
            return added
        self.is_scored = True
        for name, values in logprobs.items():
            parts = self.lists.setdefault(name, [])
            if values:
                parts.append(orjson.dumps(values)[1:-1])
                added += len(parts[-1])
        return added

    def complete(self) -> CompleteChoice:
        """Return the complete choice."""
        assert self.last is not None
        logprobs = {name: orjson.Fragment(b"[" + b",".join(parts) + b"]") for name, parts in self.lists.items()}
        blocks = tuple((kind, "".join(texts)) for kind, texts in self.blocks)
        text, thoughts = ("".join(text for kind, text in blocks if kind == one) for one in ("text", "thinking"))
        return CompleteChoice(
            self.index, text, self.last.finish_reason, self.last.stop_reason, logprobs if self.is_scored else None,
            tuple(self.token_ids), joined(self.calls), thoughts, blocks,
        )  # fmt: skip
