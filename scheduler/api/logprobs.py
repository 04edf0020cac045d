"""Log probabilities in the formats of completions, chat and prompt_logprobs."""

import math
from collections.abc import Sequence
from typing import Any

from scheduler.tokenizer.token_texts import TokenTexts
from wire.cheap_dataclass import cheap_dataclass
from wire.types import TokenLogprobs, TokenOutput

_LOWEST = -9999.0  # JSON has no minus infinity
Scored = tuple[int, TokenLogprobs | None]
"""A token and its log probability; None for the first of a prompt, which has no context."""


@cheap_dataclass(frozen=True, slots=True)
class TokenFormatter:
    """Formats tokens with the `maximum` likeliest ones at each position. `by_number`: a token is shown as `token_id:N`.

    `ranked` adds the output in prompt_logprobs' format: by token id, with ranks, unambiguous for tokens of equal text.
    `listed`: the alternatives are those the client listed, without ranks, instead of the most likely ones.
    """

    texts: TokenTexts
    maximum: int
    by_number: bool = False
    ranked: bool = False
    listed: bool = False

    def name(self, token_id: int) -> str:
        """Return the text or id that represents a token."""
        return f"token_id:{token_id}" if self.by_number else self.texts.of(token_id).text

    def completion(self, scored: Sequence[Scored], offsets: Sequence[int]) -> dict[str, Any]:
        """Return the `logprobs` of a completion; `offsets` are the positions in its text where the tokens begin."""
        return {
            "text_offset": list(offsets),
            "token_logprobs": [None if one is None else _to_finite(one.logprob) for _, one in scored],
            "tokens": [self.name(token_id) for token_id, _ in scored],
            "top_logprobs": [None if one is None else self._best_by_text(token_id, one) for token_id, one in scored],
            **self._by_id(scored),
        }

    def chat(self, scored: Sequence[Scored]) -> dict[str, Any]:
        """Return the `logprobs` of a chat choice."""
        return {
            "content": [
                self._entry(token_id, one.logprob)
                | {"top_logprobs": [self._entry(*best) for best in self._of_chat(token_id, one)]}
                for token_id, one in scored
                if one is not None
            ],
            **self._by_id(scored),
        }

    def prompt(self, scored: Sequence[Scored]) -> list[Any]:
        """Return `prompt_logprobs`: for each position the most likely tokens by id, with rank, and the actual token."""
        return [None if one is None else self._with_ranks(token_id, one) for token_id, one in scored]

    def _by_id(self, scored: Sequence[Scored]) -> dict[str, list[Any]]:
        return {"ranked": self.prompt(scored)} if self.ranked else {}

    def _most_likely(self, one: TokenLogprobs) -> list[tuple[int, float]]:
        return list(zip(one.top_ids, one.top_logprobs, strict=True))[: self.maximum]

    def _of_chat(self, token_id: int, one: TokenLogprobs) -> list[tuple[int, float]]:
        """Return a chat's alternatives: the most likely, or the actual one before those that the client listed."""
        best = self._most_likely(one)
        return [(token_id, one.logprob), *(other for other in best if other[0] != token_id)] if self.listed else best

    def _best_by_text(self, token_id: int, one: TokenLogprobs) -> dict[str, float]:
        """Return the actual token, first as in vLLM, and the most likely. Of equal texts the most likely is kept."""
        best: dict[str, float] = {}
        for other, logprob in (*self._most_likely(one), (token_id, one.logprob)):
            best.setdefault(self.name(other), _to_finite(logprob))
        own = self.name(token_id)
        return {own: best.pop(own), **best}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.name(token_id),
            "logprob": _to_finite(logprob),
            "bytes": list(self.texts.of(token_id).data),
        }

    def _with_ranks(self, token_id: int, one: TokenLogprobs) -> dict[str, Any]:
        alternatives = enumerate(self._most_likely(one), 1)
        likeliest = [(other, logprob, None if self.listed else rank) for rank, (other, logprob) in alternatives]
        own, entries = (token_id, one.logprob, one.rank), dict[str, Any]()
        for other, logprob, rank in (own, *likeliest) if self.listed else (*likeliest, own):
            text = self.texts.of(other).text
            entries.setdefault(str(other), {"logprob": _to_finite(logprob), "rank": rank, "decoded_token": text})
        return entries


def scored_output(tokens: Sequence[TokenOutput]) -> list[Scored]:
    """Return the output tokens of a piece; entries without a token are left out."""
    return [(token.token_id, token.logprobs) for token in tokens if token.token_id is not None]


def scored_prompt(token_ids: Sequence[int], found: Sequence[TokenLogprobs | None]) -> list[Scored]:
    """Return a prompt's tokens with their log probabilities."""
    return list(zip(token_ids, found, strict=True))


def _to_finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST
