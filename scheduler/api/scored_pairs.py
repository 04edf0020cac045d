"""Score pairs of texts: by a cross-encoder, which reads a pair as one prompt, or by the cosine of their vectors."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field
from starlette.requests import Request

from scheduler.api.inputs import encode_inputs, fitting
from scheduler.api.pooled_response import PooledResponse, pooling_request
from scheduler.api.pooling_body import PoolingBody
from scheduler.api.refusals import SCORE_NOT_SERVED, Refusal
from scheduler.api.request_ids import new_id, shown_id
from scheduler.app_context import AppContext
from scheduler.model.kind import ModelKind
from scheduler.tokenizer.truncation import tokens_kept
from scheduler.vectors import Values, cosine
from wire.errors import InvalidRequest
from wire.types import Pooling

Ids = tuple[int, ...]
_TokenLimit = Annotated[int, Field(ge=-(2**31), lt=2**31, json_schema_extra={"minimum": 0})]


class PairsBody(PoolingBody):
    """The common fields of the bodies that request scores. A limit of 0 tokens cuts nothing."""

    not_served: ClassVar[Mapping[str, Refusal]] = SCORE_NOT_SERVED

    max_tokens_per_query: _TokenLimit | None = None
    max_tokens_per_doc: _TokenLimit | None = None


@dataclass(frozen=True, slots=True)
class TextPairs:
    """`first` is one text to compare with each of `second`, or has one text for each; `names` are their fields."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    names: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of a request, one per pair, and what every answer names."""

    scores: Sequence[float]
    answer_id: str
    model: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Reading:
    """The prompts to compute, their poolings, and how their values become one score per pair."""

    prompts: tuple[Ids, ...]
    poolings: tuple[Pooling, ...]
    scores: Callable[[Sequence[Values]], list[float]]


async def prepare_scores(
    context: AppContext, request: Request, body: PairsBody, pairs: TextPairs, prefix: str,
    build: Callable[[Scored], dict[str, Any]],
) -> PooledResponse:  # fmt: skip
    """Return the response whose body `build` makes from the scores. Raises InvalidRequest, PromptTooLong."""
    model, names = context.model_named(body.model), pairs.names
    first = await _shortened(context, pairs.first, body.max_tokens_per_query, "max_tokens_per_query", names[0])
    second = await _shortened(context, pairs.second, body.max_tokens_per_doc, "max_tokens_per_doc", names[1])
    is_cross = context.tokens.files.kind is ModelKind.SCORES
    reading = await (_read_pairs if is_cross else _read_singly)(context, body, TextPairs(first, second, names))
    wanted = pooling_request(context, request, new_id(prefix), reading.prompts, reading.poolings, body)
    num_tokens = sum(map(len, reading.prompts))

    async def build_body(vectors: list[Values]) -> dict[str, Any]:
        answer_id = shown_id(wanted.request_id, request, body.request_id)
        return build(Scored(reading.scores(vectors), answer_id, model, num_tokens))

    return PooledResponse(context, wanted, build_body)


async def _shortened(
    context: AppContext, texts: tuple[str, ...], limit: int | None, limit_name: str, param: str
) -> tuple[str, ...]:
    """Return the texts, each cut to its first `limit` tokens."""
    longest = context.tokens.max_model_len
    if not limit:
        return texts
    if not 0 < limit < longest:
        raise InvalidRequest(
            f"{limit_name} is {limit}, but must be from 0 to {longest - 1}, below the model's maximum length",
            limit_name,
        )
    return tuple([await context.tokens.shorten(text, limit) for text in texts])


async def _read_pairs(context: AppContext, body: PairsBody, pairs: TextPairs) -> _Reading:
    """Make one prompt per pair: a cross-encoder reads both texts as one sequence."""
    tokens, prompts, poolings, param = context.tokens, [], [], pairs.names[1]
    longest = tokens_kept(body.truncate_prompt_tokens, room=tokens.max_model_len)
    for left, right in zip(pairs.first * (len(pairs.second) // len(pairs.first)), pairs.second, strict=True):
        ids, begin = await tokens.encode_pair(left, right, longest=longest, param=param)
        if begin in (0, len(ids)):
            raise InvalidRequest(f"{param}: a text has no tokens", param)
        prompts.append(fitting(ids, tokens, param))
        poolings.append(Pooling("classify", normalize=body.use_activation, second_text=begin))
        await asyncio.sleep(0)
    return _Reading(tuple(prompts), tuple(poolings), lambda values: [value[0] for value in values])


async def _read_singly(context: AppContext, body: PairsBody, pairs: TextPairs) -> _Reading:
    """Make one prompt per text; the score of a pair is the cosine of its two vectors."""
    tokens, keep, side = context.tokens, body.truncate_prompt_tokens, body.truncation_side or "left"
    left, right = [
        await encode_inputs(texts, tokens, add_special_tokens=True, keep=keep, side=side, param=param)
        for texts, param in zip((pairs.first, pairs.second), pairs.names, strict=True)
    ]

    def scores(vectors: Sequence[Values]) -> list[float]:
        heads, tails = vectors[: len(left)], vectors[len(left) :]
        return [cosine(heads[index % len(heads)], tail) for index, tail in enumerate(tails)]

    return _Reading((*left, *right), (Pooling(),) * (len(left) + len(right)), scores)
