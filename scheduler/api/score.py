"""POST /v1/score and /score: how similar two texts are."""

import time
from typing import Any

from starlette.requests import Request

from scheduler.api.field_schemas import AnyTexts
from scheduler.api.inputs import read_texts
from scheduler.api.pooled_response import PooledResponse
from scheduler.api.read_body import read_body
from scheduler.api.scored_pairs import PairsBody, Scored, TextPairs, prepare_scores
from scheduler.api.usage import input_usage
from scheduler.app_context import AppContext
from wire.errors import InvalidRequest

_NAMES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class ScoreBody(PairsBody):
    """The body of /v1/score: one text compared with one or several, or two lists of equal length compared pairwise.

    The texts are in one of four pairs of fields: text_1 and text_2, queries and documents, queries and items, data_1
    and data_2.
    """

    text_1: AnyTexts = None
    text_2: AnyTexts = None
    queries: AnyTexts = None
    documents: AnyTexts = None
    items: AnyTexts = None
    data_1: AnyTexts = None
    data_2: AnyTexts = None


async def create_score(context: AppContext, request: Request) -> PooledResponse:
    """Return the response that will run one request. Raises a PdserveError or HttpError if the request is invalid."""
    return await prepare_score(context, await read_body(context, request, ScoreBody), request)


async def prepare_score(context: AppContext, body: ScoreBody, request: Request) -> PooledResponse:
    """Tokenise and check a body."""
    pairs = _text_pairs(body, context.config.options.max_inputs)
    return await prepare_scores(context, request, body, pairs, "score", _answer)


def _text_pairs(body: ScoreBody, maximum: int) -> TextPairs:
    names = _names(body)
    first, second = (read_texts(getattr(body, name), name, max_inputs=maximum) for name in names)
    if len(first) not in (1, len(second)):
        raise InvalidRequest(
            f"{names[0]} has {len(first)} texts, but {names[1]} has {len(second)}: {names[0]} must have one, or as "
            f"many as {names[1]}",
            names[0],
        )
    return TextPairs(first, second, names)


def _names(body: ScoreBody) -> tuple[str, str]:
    """Return the pair of fields that are set. Raises InvalidRequest if one is missing or others are set too."""
    given = {name for names in _NAMES for name in names if getattr(body, name) is not None}
    names = max(_NAMES, key=lambda names: len(given.intersection(names)))
    for name in names:
        if name not in given:
            raise InvalidRequest(f"{name} is missing", name)
    if other := sorted(given.difference(names)):
        raise InvalidRequest(f"{other[0]}: the texts are already in {names[0]} and {names[1]}", other[0])
    return names


def _answer(scored: Scored) -> dict[str, Any]:
    return {
        "id": scored.answer_id,
        "object": "list",
        "created": int(time.time()),
        "model": scored.model,
        "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scored.scores)],
        "usage": input_usage(scored.num_tokens),
    }
