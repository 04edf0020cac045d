"""POST /pooling and /classify: vectors or classes of texts, or of each of their tokens."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from starlette.requests import Request

from scheduler.api.embeddings import Dimensions, check_dimensions
from scheduler.api.input_body import InputBody, prompts_of
from scheduler.api.pooled_response import PooledResponse, pooling_request
from scheduler.api.read_body import read_body
from scheduler.api.refusals import CLASSIFY_NOT_SERVED, Refusal
from scheduler.api.request_ids import new_id, shown_id
from scheduler.api.usage import input_usage
from scheduler.api.vector_data import EncodedBody, VectorBytes, encode_answer
from scheduler.app_context import AppContext
from scheduler.model.kind import ModelKind
from scheduler.vectors import Values
from wire.errors import InvalidRequest
from wire.types import Pooling

_Finish = Callable[[dict[str, Any], list[Values], Sequence[tuple[int, ...]]], Awaitable[dict[str, Any] | VectorBytes]]
_EMBED, _CLASSIFY = ("embed", "token_embed"), ("classify", "token_classify")
_TASKS = {
    ModelKind.TEXT: _EMBED,
    ModelKind.VECTORS: _EMBED,
    ModelKind.SCORES: _CLASSIFY,
    ModelKind.CLASSES: _CLASSIFY,
}  # fmt: skip


class ClassifyBody(InputBody):
    """The body of /classify."""

    not_served: ClassVar[Mapping[str, Refusal]] = CLASSIFY_NOT_SERVED


class TaskBody(InputBody, EncodedBody):
    """The body of /pooling. `task` defaults to embed, or to classify if the model classifies."""

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None
    dimensions: Dimensions | None = None


async def create_classification(context: AppContext, request: Request) -> PooledResponse:
    """Return the response that will run one request of /classify. Raises a PdserveError or HttpError."""
    return await prepare_classification(context, await read_body(context, request, ClassifyBody), request)


async def prepare_classification(context: AppContext, body: ClassifyBody, request: Request) -> PooledResponse:
    """Tokenise and check a body of /classify."""
    pooling = Pooling("classify", normalize=body.use_activation)
    labels = context.tokens.files.labels

    async def finish(
        answer: dict[str, Any], vectors: list[Values], prompts: Sequence[tuple[int, ...]]
    ) -> dict[str, Any]:
        data = [
            {"index": index, "label": _name(labels, probs), "probs": probs, "num_classes": len(probs)}
            for index, probs in enumerate(vectors)
        ]
        return answer | {"data": data}

    return await _prepare(context, request, body, "classify", pooling, finish)


async def create_pooling(context: AppContext, request: Request) -> PooledResponse:
    """Return the response that will run one request of /pooling. Raises a PdserveError or HttpError."""
    body = await read_body(context, request, TaskBody)
    check_dimensions(context, body.dimensions, "dimensions")
    pooling = Pooling(_task(body, context.tokens.files.kind), dimensions=body.dimensions, normalize=body.use_activation)
    maximum = context.config.options.max_answer_bytes

    async def finish(
        answer: dict[str, Any], vectors: list[Values], prompts: Sequence[tuple[int, ...]]
    ) -> dict[str, Any] | VectorBytes:
        rows = [len(prompt) if pooling.of_tokens else None for prompt in prompts]
        return await encode_answer(answer, vectors, rows, "pooling", body, maximum)

    return await _prepare(context, request, body, "pooling", pooling, finish)


async def _prepare(
    context: AppContext, request: Request, body: InputBody, prefix: str, pooling: Pooling, finish: _Finish
) -> PooledResponse:
    """Tokenise and check a body; `finish` adds the prompts' values to the answer."""
    model, prompts = context.model_named(body.model), await prompts_of(context, body)
    wanted = pooling_request(context, request, new_id(prefix), prompts, (pooling,) * len(prompts), body)

    async def build_body(vectors: list[Values]) -> dict[str, Any] | VectorBytes:
        answer = {
            "id": shown_id(wanted.request_id, request, body.request_id),
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [],
            "usage": input_usage(sum(map(len, prompts))),
        }
        return await finish(answer, vectors, prompts)

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
