"""POST /pooling and /classify: vectors or classes of texts, or of each of their tokens."""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from starlette.requests import Request

from scheduler.api.embeddings import Dimensions
from scheduler.api.input_body import InputBody, prompts_of
from scheduler.api.pooled_response import PooledResponse, pooling_request
from scheduler.api.read_body import read_body
from scheduler.api.request_ids import new_id, shown_id
from scheduler.api.usage import input_usage
from scheduler.api.vector_data import EncodingFormat, encode_vectors
from scheduler.app_context import AppContext
from scheduler.model.kind import ModelKind
from scheduler.vectors import Values
from wire.errors import InvalidRequest
from wire.types import Pooling

_MakeData = Callable[[list[Values], Sequence[tuple[int, ...]]], Awaitable[Sequence[Any]]]
_EMBED, _CLASSIFY = ("embed", "token_embed"), ("classify", "token_classify")
_TASKS = {
    ModelKind.TEXT: _EMBED,
    ModelKind.VECTORS: _EMBED,
    ModelKind.SCORES: _CLASSIFY,
    ModelKind.CLASSES: _CLASSIFY,
}  # fmt: skip


class ClassifyBody(InputBody):
    """The body of /classify."""


class TaskBody(InputBody):
    """The body of /pooling. Without `task` it is embed, or classify if the model classifies."""

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None
    encoding_format: EncodingFormat | None = None
    dimensions: Dimensions | None = None


async def create_classification(context: AppContext, request: Request) -> PooledResponse:
    """Return the response to one request of /classify, not yet run. Raises a PdserveError or HttpError."""
    return await prepare_classification(context, await read_body(context, request, ClassifyBody), request)


async def prepare_classification(context: AppContext, body: ClassifyBody, request: Request) -> PooledResponse:
    """Tokenise and check a body of /classify."""
    pooling = Pooling("classify", normalize=body.use_activation)
    labels = context.tokens.files.labels

    async def data(vectors: list[Values], prompts: Sequence[tuple[int, ...]]) -> list[dict[str, Any]]:
        return [
            {"index": index, "label": _name(labels, probs), "probs": probs, "num_classes": len(probs)}
            for index, probs in enumerate(vectors)
        ]

    return await _prepare(context, request, body, "classify", pooling, data)


async def create_pooling(context: AppContext, request: Request) -> PooledResponse:
    """Return the response to one request of /pooling, not yet run. Raises a PdserveError or HttpError."""
    body = await read_body(context, request, TaskBody)
    pooling = Pooling(_task(body, context.tokens.files.kind), dimensions=body.dimensions, normalize=body.use_activation)
    maximum, as_base64 = context.config.options.max_answer_bytes, body.encoding_format == "base64"

    async def data(vectors: list[Values], prompts: Sequence[tuple[int, ...]]) -> Sequence[Any]:
        rows = [len(prompt) if pooling.of_tokens else None for prompt in prompts]
        return await encode_vectors(vectors, rows, "pooling", as_base64=as_base64, max_bytes=maximum)

    return await _prepare(context, request, body, "pool", pooling, data)


async def _prepare(
    context: AppContext, request: Request, body: InputBody, prefix: str, pooling: Pooling, data: _MakeData
) -> PooledResponse:
    """Tokenise and check a body; `data` makes the answer's field of this name from the values and the prompts."""
    model, prompts = context.model_named(body.model), await prompts_of(context, body)
    wanted = pooling_request(context, request, new_id(prefix), prompts, (pooling,) * len(prompts), body)

    async def build_body(vectors: list[Values]) -> dict[str, Any]:
        return {
            "id": shown_id(wanted.request_id, request, body.request_id),
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": await data(vectors, prompts),
            "usage": input_usage(sum(map(len, prompts))),
        }

    return PooledResponse(context, wanted, build_body)


def _task(body: TaskBody, kind: ModelKind) -> str:
    """Return the kind of pooling. Raises InvalidRequest for one that the model's kind never supports."""
    supported = _TASKS[kind]
    task = body.task or supported[0]
    if task not in supported:
        raise InvalidRequest(f"task {task}: the model {kind.does} and supports {' and '.join(supported)}", "task")
    if body.dimensions is not None and supported is _CLASSIFY:
        raise InvalidRequest(f"dimensions are for embed and token_embed, not for {task}", "dimensions")
    return task


def _name(labels: Sequence[str], probs: Values) -> str | None:
    best = max(range(len(probs)), key=probs.__getitem__)
    return labels[best] if best < len(labels) else None
