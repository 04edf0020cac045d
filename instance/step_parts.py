"""Split a step's message into messages that fit the session: usually one, several if it has many logprobs. Pure.

Messages with prompt logprobs precede the tokens that follow those prompts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from rpc.channel import MAX_MESSAGE_BYTES
from wire.messages import Step
from wire.types import PromptLogprobs, StageTimes, TokenLogprobs, TokenOutput

T = TypeVar("T")

MAX_BYTES = MAX_MESSAGE_BYTES // 2  # by the estimates below, which exceed the encoded size
_SURELY_FEW = 256  # tokens without logprobs: too small to be worth counting
_TOKEN_BYTES, _SCORE_BYTES, _RANKED_BYTES, _TIMES_BYTES = 64, 40, 8 + 5, 192


def parts_of(step: Step, max_bytes: int = MAX_BYTES) -> Iterator[Step]:
    """Yield `step` whole, or split into steps of at most `max_bytes` each (a token or position is never split)."""
    if _is_small(step, max_bytes):
        yield step
        return
    remainder = replace(step, tokens=(), times=(), prompt_logprobs=())
    for scored in step.prompt_logprobs:
        for part in _cut_scores(scored, max_bytes):
            yield replace(remainder, prompt_logprobs=(part,))
    for tokens in _cut(step.tokens, _bytes_of_token, max_bytes):
        yield replace(remainder, tokens=tokens)
    for times in _cut(step.times, _bytes_of_times, max_bytes):
        yield replace(remainder, times=times)


def _is_small(step: Step, max_bytes: int) -> bool:
    scores = any(token.logprobs is not None for token in step.tokens) or step.prompt_logprobs
    if not scores and len(step.tokens) <= _SURELY_FEW and max_bytes == MAX_BYTES:
        return True
    scored = sum(_bytes_of_score(one) for part in step.prompt_logprobs for one in part.tokens)
    others = sum(map(_bytes_of_token, step.tokens)) + sum(map(_bytes_of_times, step.times))
    return scored + others <= max_bytes


def _cut_scores(scored: PromptLogprobs, max_bytes: int) -> Iterator[PromptLogprobs]:
    start = scored.start
    for tokens in _cut(scored.tokens, _bytes_of_score, max_bytes):
        yield PromptLogprobs(scored.prompt_id, start, tokens)
        start += len(tokens)


def _cut(items: Sequence[T], num_bytes: Callable[[T], int], max_bytes: int) -> Iterator[tuple[T, ...]]:
    """Yield the items in order, as many at a time as fit, but at least one."""
    first = total = 0
    for place, item in enumerate(items):
        total += num_bytes(item)
        if total > max_bytes and place > first:
            yield tuple(items[first:place])
            first, total = place, num_bytes(item)
    if first < len(items):
        yield tuple(items[first:])


def _bytes_of_token(token: TokenOutput) -> int:
    return _TOKEN_BYTES + 3 * len(token.prompt_id) + _bytes_of_score(token.logprobs)


def _bytes_of_score(score: TokenLogprobs | None) -> int:
    return _SCORE_BYTES + (0 if score is None else _RANKED_BYTES * len(score.top_ids))


def _bytes_of_times(entry: tuple[str, StageTimes]) -> int:
    return _TIMES_BYTES + 3 * len(entry[0])
