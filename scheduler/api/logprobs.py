"""Log probabilities as the two surfaces and prompt_logprobs tell them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scheduler.request import NewToken
from scheduler.tokenizer.token_texts import TokenTexts
from wire.types import TokenLogprobs

_LOWEST = -9999.0  # JSON has no minus infinity
Scored = tuple[int, TokenLogprobs | None]
"""A token and how likely it was; None for the first of a prompt, which nothing precedes."""


@dataclass(frozen=True, slots=True)
class TokenTeller:
    """Tells tokens with the `most` likeliest beside each; by number (`token_id:N`) where the client asked for that.

    `ranked` tells an output once more as prompts are: by token id, with ranks, whatever tokens are called alike.
    Beside a token stand those that the client `listed`, whose ranks are not known, in place of the likeliest.
    """

    texts: TokenTexts
    most: int
    by_number: bool = False
    ranked: bool = False
    listed: bool = False

    def name(self, token_id: int) -> str:
        """Return what a token is called."""
        return f"token_id:{token_id}" if self.by_number else self.texts.of(token_id).text

    def completion(self, scored: Sequence[Scored], offsets: Sequence[int]) -> dict[str, Any]:
        """Return the `logprobs` of a completion; `offsets` are where in its text the tokens begin."""
        return {
            "text_offset": list(offsets),
            "token_logprobs": [None if one is None else _told(one.logprob) for _, one in scored],
            "tokens": [self.name(token_id) for token_id, _ in scored],
            "top_logprobs": [None if one is None else self._best(token_id, one) for token_id, one in scored],
            **self._by_id(scored),
        }

    def chat(self, scored: Sequence[Scored]) -> dict[str, Any]:
        """Return the `logprobs` of a chat choice."""
        return {
            "content": [
                self._entry(token_id, one.logprob)
                | {"top_logprobs": [self._entry(*best) for best in self._likeliest(one)]}
                for token_id, one in scored
                if one is not None
            ],
            **self._by_id(scored),
        }

    def prompt(self, scored: Sequence[Scored]) -> list[Any]:
        """Return `prompt_logprobs`: for each token the likeliest by id, with rank, and the token that is there."""
        return [None if one is None else self._ranked(token_id, one) for token_id, one in scored]

    def _by_id(self, scored: Sequence[Scored]) -> dict[str, list[Any]]:
        return {"ranked": self.prompt(scored)} if self.ranked else {}

    def _likeliest(self, one: TokenLogprobs) -> list[tuple[int, float]]:
        return list(zip(one.top_ids, one.top_logprobs, strict=True))[: self.most]

    def _best(self, token_id: int, one: TokenLogprobs) -> dict[str, float]:
        """The likeliest, and the token that is there. Of tokens that are called alike the likeliest is told."""
        best: dict[str, float] = {}
        for other, logprob in (*self._likeliest(one), (token_id, one.logprob)):
            best.setdefault(self.name(other), _told(logprob))
        return best

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.name(token_id),
            "logprob": _told(logprob),
            "bytes": list(self.texts.of(token_id).data),
        }

    def _ranked(self, token_id: int, one: TokenLogprobs) -> dict[str, Any]:
        beside = enumerate(self._likeliest(one), 1)
        likeliest = [(other, logprob, None if self.listed else rank) for rank, (other, logprob) in beside]
        own, told = (token_id, one.logprob, one.rank), dict[str, Any]()
        for other, logprob, rank in (own, *likeliest) if self.listed else (*likeliest, own):
            text = self.texts.of(other).text
            told.setdefault(str(other), {"logprob": _told(logprob), "rank": rank, "decoded_token": text})
        return told


def scored_output(tokens: Sequence[NewToken]) -> list[Scored]:
    """Return the output tokens of a piece that have one."""
    return [(token.token_id, token.logprobs) for token in tokens if token.token_id is not None]


def scored_prompt(token_ids: Sequence[int], found: Sequence[TokenLogprobs | None]) -> list[Scored]:
    """Return a prompt's tokens with what was found of them."""
    return list(zip(token_ids, found, strict=True))


def _told(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST
