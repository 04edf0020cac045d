"""Beam search over one prompt: which hypotheses continue, which are done, and when the search has ended. Pure.

One step: every live beam gets candidates (the best next tokens), and all candidates are ranked by summed log
probability. A stop token or the length limit ends a hypothesis, which counts if it is among the first `width`; the best
`width` of the others stay live. The rules are those of transformers' `generate(num_beams=...)`.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from wire.types import Beam, BeamSearch, SamplingParams, TokenLogprobs

Offer = tuple[int, float, TokenLogprobs | None]
"""A candidate: its token id, its log probability after all processors, and the log probabilities to report."""
_MAX_EXPONENT = 600.0  # exp(600) and exp(-600) are well inside a float's range


@dataclass(frozen=True, slots=True)
class Continuation:
    """Live beam `parent` extended by `token_id`; `score` is the sum of its log probabilities including that token.

    `logprobs` are the token's, if log probabilities were requested.
    """

    parent: int
    token_id: int
    score: float
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Search:
    """The state of a search. `live` is sorted by summed log probability, `done` by ranking score, both highest first.

    `improvable`: a live beam may still beat the worst of `done`; once none can, nothing is added to `done`.
    """

    live: tuple[Beam, ...] = (Beam((), 0.0),)
    done: tuple[Beam, ...] = ()
    improvable: bool = True

    @property
    def length(self) -> int:
        """Output tokens of each live beam."""
        return len(self.live[0].token_ids) if self.live else 0


@dataclass(frozen=True, slots=True)
class Advanced:
    """The search after one step. Live beam i is `kept[i]`; `kept` is empty when the search `has_ended`."""

    search: Search
    kept: tuple[Continuation, ...]
    has_ended: bool


def num_candidates(params: SamplingParams) -> int:
    """Return how many candidates each live beam needs so that `width` can continue, whichever are stop tokens."""
    return params.num_beams + len(params.stop_token_ids)


def advance(search: Search, candidates: Sequence[Sequence[Offer]], params: SamplingParams, *, limit: int) -> Advanced:
    """Take one step. `candidates[i]` are those of live beam i; `limit` bounds the output tokens.

    Tokens that cannot be chosen (-inf) are ignored.
    """
    ordered = _best_continuations(search.live, candidates, params.num_beams * (1 + len(params.stop_token_ids)))
    length, width = search.length + 1, params.num_beams
    ends = [length >= limit or one.token_id in params.stop_token_ids for one in ordered]
    kept = tuple(one for one, ended in zip(ordered, ends, strict=True) if not ended)[:width]
    closed = [
        _extend_beam(search, one, params, done=True)
        for one, ended in zip(ordered[:width], ends, strict=False)
        if ended and _may_add(search, params)
    ]
    done = tuple(sorted((*search.done, *closed), key=lambda beam: -ranking_score(beam, params))[:width])
    live = tuple(_extend_beam(search, one, params, done=False) for one in kept)
    improvable = search.improvable and _can_improve(live, done, params, length=length, limit=limit)
    full = len(done) == width and params.beam_search is not None and params.beam_search.early_stopping is True
    has_ended = not improvable or full or not live
    return Advanced(Search(() if has_ended else live, done, improvable), () if has_ended else kept, has_ended)


def ranking_score(beam: Beam, params: SamplingParams) -> float:
    """Return the score that ranks hypotheses: the sum of log probabilities / length ** length_penalty."""
    return _per_length(beam.score, len(beam.token_ids), _search_of(params).length_penalty)


def winners(search: Search, params: SamplingParams) -> tuple[Beam, ...]:
    """Return the `n` best hypotheses of a search that has ended, best first; fewer if there are fewer."""
    return search.done[: params.n]


def describe(search: Search) -> tuple[Beam, ...]:
    """Return the search as the beams of a PromptState."""
    return (*search.live, *search.done)


def resume(beams: Sequence[Beam], params: SamplingParams, *, limit: int) -> Search:
    """Return the search that `describe` turned into `beams`; a new search if there are none."""
    if not beams:
        return Search()
    live = tuple(beam for beam in beams if not beam.done)
    done = tuple(beam for beam in beams if beam.done)
    length = len(live[0].token_ids) if live else 0
    return Search(live, done, bool(live) and _can_improve(live, done, params, length=length, limit=limit))


def _best_continuations(live: Sequence[Beam], candidates: Sequence[Sequence[Offer]], count: int) -> list[Continuation]:
    every = (
        Continuation(parent, token_id, beam.score + logprob, described)
        for parent, (beam, offered) in enumerate(zip(live, candidates, strict=True))
        for token_id, logprob, described in offered
        if not math.isinf(logprob)
    )
    return heapq.nsmallest(count, every, key=lambda one: (-one.score, one.parent, one.token_id))


def _extend_beam(search: Search, one: Continuation, params: SamplingParams, *, done: bool) -> Beam:
    stop = one.token_id if done and one.token_id in params.stop_token_ids else None
    parent, described = search.live[one.parent], () if one.logprobs is None else (one.logprobs,)
    return Beam((*parent.token_ids, one.token_id), one.score, done, stop, (*parent.logprobs, *described))


def _may_add(search: Search, params: SamplingParams) -> bool:
    full = len(search.done) == params.num_beams
    return search.improvable and not (full and _search_of(params).early_stopping is True)


def _can_improve(
    live: Sequence[Beam], done: Sequence[Beam], params: SamplingParams, *, length: int, limit: int
) -> bool:
    """Return whether the best live beam, at its best possible length, could beat the worst hypothesis done."""
    if len(done) < params.num_beams:
        return True
    if not live:
        return False
    options = _search_of(params)
    at = limit if options.early_stopping == "never" and options.length_penalty > 0 else length
    return _per_length(live[0].score, at, options.length_penalty) > min(ranking_score(beam, params) for beam in done)


def _per_length(score: float, length: int, penalty: float) -> float:
    """Return score / length ** penalty, with the exponent limited to a float's range."""
    exponent = penalty * math.log(length)
    if abs(exponent) <= _MAX_EXPONENT:
        return score / math.pow(length, penalty)
    return score / math.exp(math.copysign(_MAX_EXPONENT, exponent))


def _search_of(params: SamplingParams) -> BeamSearch:
    assert params.beam_search is not None, "a prompt without beam search has no beams"
    return params.beam_search
