"""POST /v1/score and /score: the similarity of two texts, by cross-encoder score or cosine of their vectors."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from starlette.requests import Request

from scheduler.api.field_schemas import AnyTexts
from scheduler.api.inputs import encode_inputs, fitting, read_texts
from scheduler.api.pooled_response import PooledResponse, pooling_request
from scheduler.api.pooling_body import PoolingBody
from scheduler.api.read_body import read_body
from scheduler.api.refusals import SCORE_NOT_SERVED, Refusal
from scheduler.api.request_ids import new_id, shown_id
from scheduler.app_context import AppContext
from scheduler.model.kind import ModelKind
from scheduler.tokenizer.truncation import tokens_kept
from scheduler.vectors import Values, cosine
from wire.errors import InvalidRequest
from wire.types import Pooling

Ids = tuple[int, ...]


class ScoreBody(PoolingBody):
    """The body of /v1/score: one text compared with one or several, or two lists of equal length compared pairwise."""

    not_served: ClassVar[Mapping[str, Refusal]] = SCORE_NOT_SERVED

    text_1: AnyTexts
    text_2: AnyTexts


@dataclass(frozen=True, slots=True)
class _Reading:
    """The prompts to compute, their poolings, and how their values become one score per pair."""

    prompts: tuple[Ids, ...]
    poolings: tuple[Pooling, ...]
    scores: Callable[[Sequence[Values]], list[float]]


async def create_score(context: AppContext, request: Request) -> PooledResponse:
    """Return the response to one request, not yet run. Raises a PdserveError or HttpError for an invalid one."""
    return await prepare_score(context, await read_body(context, request, ScoreBody), request)


async def prepare_score(context: AppContext, body: ScoreBody, request: Request) -> PooledResponse:
    """Tokenise and check a body."""
    model = context.model_named(body.model)
    first, second = _text_pairs(body, context.config.options.max_inputs)
    is_cross = context.tokens.files.kind is ModelKind.SCORES
    reading = await (_read_pairs if is_cross else _read_singly)(context, body, first, second)
    wanted = pooling_request(context, request, new_id("score"), reading.prompts, reading.poolings, body)
    num_tokens = sum(map(len, reading.prompts))

    async def build_body(vectors: list[Values]) -> dict[str, Any]:
        return {
            "id": shown_id(wanted.request_id, request, body.request_id),
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [
                {"index": index, "object": "score", "score": score}
                for index, score in enumerate(reading.scores(vectors))
            ],
            "usage": {
                "prompt_tokens": num_tokens,
                "total_tokens": num_tokens,
                "completion_tokens": 0,
                "prompt_tokens_details": None,
            },
        }

    return PooledResponse(context, wanted, build_body)


def _text_pairs(body: ScoreBody, maximum: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    first = read_texts(body.text_1, "text_1", max_inputs=maximum)
    second = read_texts(body.text_2, "text_2", max_inputs=maximum)
    if len(first) not in (1, len(second)):
        raise InvalidRequest(
            f"text_1 has {len(first)} texts and text_2 {len(second)}: pass one text_1, or as many as text_2", "text_1"
        )
    return first, second


async def _read_pairs(
    context: AppContext, body: ScoreBody, first: tuple[str, ...], second: tuple[str, ...]
) -> _Reading:
    """One prompt per pair, which a cross-encoder reads as one sequence."""
    tokens, prompts, poolings = context.tokens, [], []
    longest = tokens_kept(body.truncate_prompt_tokens, room=tokens.max_model_len)
    for left, right in zip(first * (len(second) // len(first)), second, strict=True):
        ids, begin = await tokens.encode_pair(left, right, longest=longest)
        if begin in (0, len(ids)):
            raise InvalidRequest("text_2: a text has no tokens", "text_2")
        prompts.append(fitting(ids, tokens, "text_2"))
        poolings.append(Pooling("classify", second_text=begin))
        await asyncio.sleep(0)
    return _Reading(tuple(prompts), tuple(poolings), lambda values: [value[0] for value in values])


async def _read_singly(
    context: AppContext, body: ScoreBody, first: tuple[str, ...], second: tuple[str, ...]
) -> _Reading:
    """One prompt per text; the score of a pair is the cosine of its vectors."""
    keep, side = body.truncate_prompt_tokens, body.truncation_side or "left"
    left = await encode_inputs(first, context.tokens, add_special_tokens=True, keep=keep, side=side, param="text_1")
    right = await encode_inputs(second, context.tokens, add_special_tokens=True, keep=keep, side=side, param="text_2")

    def scores(vectors: Sequence[Values]) -> list[float]:
        heads, tails = vectors[: len(left)], vectors[len(left) :]
        return [cosine(heads[index % len(heads)], tail) for index, tail in enumerate(tails)]

    return _Reading((*left, *right), (Pooling(),) * (len(left) + len(right)), scores)
