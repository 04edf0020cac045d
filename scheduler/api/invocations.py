"""POST /invocations, SageMaker's only inference route: the fields of the body select the API to call."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from scheduler.api.chat import prepare_chat
from scheduler.api.completions import prepare_completion
from scheduler.api.embeddings import EmbeddingBody, prepare_embedding
from scheduler.api.generation_body import ChatBody, CompletionBody
from scheduler.api.pooling import ClassifyBody, prepare_classification
from scheduler.api.read_body import AnyBody, check_body
from scheduler.api.read_json import read_json
from scheduler.api.rerank import RerankBody, prepare_rerank
from scheduler.api.route_entry import CLASSES, SCORES, TEXT, VECTORS, check_kind
from scheduler.api.score import ScoreBody, prepare_score
from scheduler.app_context import AppContext
from scheduler.model.kind import ModelKind
from wire.errors import InvalidRequest

_Answer = Callable[[AppContext, Mapping[str, Any], Request], Awaitable[ASGIApp]]


async def invoke(context: AppContext, request: Request) -> ASGIApp:
    """Return the response of the route that the body is for. Raises a PdserveError or HttpError for an invalid body."""
    raw = await read_json(request, context.config.options)
    kind = context.tokens.files.kind
    for field, (needs, answer) in {**_BY_FIELD, **_BY_FIELD_OF.get(kind, {})}.items():
        if raw.get(field) is not None:
            check_kind(kind, needs, f"{field} in /invocations")
            return await answer(context, raw, request)
    raise InvalidRequest(f"the body has none of {', '.join(_BY_FIELD)}: set one to select the API")


def _answer_as(kind: type[AnyBody], prepare: Callable[[AppContext, AnyBody, Request], Awaitable[ASGIApp]]) -> _Answer:
    async def answer(context: AppContext, raw: Mapping[str, Any], request: Request) -> ASGIApp:
        return await prepare(context, check_body(raw, kind, request), request)

    return answer


_BY_FIELD: dict[str, tuple[frozenset[ModelKind], _Answer]] = {
    "messages": (TEXT, _answer_as(ChatBody, prepare_chat)),
    "prompt": (TEXT, _answer_as(CompletionBody, prepare_completion)),
    "input": (VECTORS, _answer_as(EmbeddingBody, prepare_embedding)),
    **dict.fromkeys(("text_1", "queries", "data_1"), (SCORES, _answer_as(ScoreBody, prepare_score))),
    "query": (SCORES, _answer_as(RerankBody, prepare_rerank)),
}
_VECTORS = dict.fromkeys(("messages", "input"), (VECTORS, _answer_as(EmbeddingBody, prepare_embedding)))
_CLASSES = dict.fromkeys(("messages", "input"), (CLASSES, _answer_as(ClassifyBody, prepare_classification)))
_BY_FIELD_OF: dict[ModelKind, dict[str, tuple[frozenset[ModelKind], _Answer]]] = {
    ModelKind.VECTORS: _VECTORS,
    ModelKind.CLASSES: _CLASSES,
    ModelKind.SCORES: _CLASSES,
}
"""The APIs of models that generate no text: the fields that select them are also those of chats and embeddings."""
