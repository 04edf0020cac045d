"""POST /v1/embeddings: one vector per text."""

import time
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request

from scheduler.api.input_body import InputBody, prompts_of
from scheduler.api.pooled_response import PooledResponse, pooling_request
from scheduler.api.read_body import read_body
from scheduler.api.request_ids import new_id, shown_id
from scheduler.api.vector_data import EncodedBody, VectorBytes, encode_answer
from scheduler.app_context import AppContext
from scheduler.vectors import Values
from wire.errors import InvalidRequest
from wire.types import Pooling

Dimensions = Annotated[int, Field(ge=1, lt=2**31)]


class EmbeddingBody(InputBody, EncodedBody):
    """The body of /v1/embeddings."""

    dimensions: Dimensions | None = None


def check_dimensions(context: AppContext, given: int | None, field: str) -> None:
    """Raise InvalidRequest if the model's vectors may not be cut to this number of dimensions."""
    allowed = context.tokens.files.dimensions
    if given is None:
        return
    if allowed is None:
        raise InvalidRequest(
            f"{field} is {given}, but the model was not trained for truncated vectors: leave it out "
            "(--hf-overrides '{\"is_matryoshka\": true}' allows any number)",
            field,
        )
    if allowed and given not in allowed:
        names = ", ".join(map(str, allowed))
        raise InvalidRequest(f"{field} is {given}, but must be one that the model was trained for: {names}", field)


async def create_embedding(context: AppContext, request: Request) -> PooledResponse:
    """Return the response that will run one request. Raises a PdserveError or HttpError if the request is invalid."""
    return await prepare_embedding(context, await read_body(context, request, EmbeddingBody), request)


async def prepare_embedding(context: AppContext, body: EmbeddingBody, request: Request) -> PooledResponse:
    """Tokenise and check a body."""
    model = context.model_named(body.model)
    prompts = await prompts_of(context, body)
    check_dimensions(context, body.dimensions, "dimensions")
    pooling = Pooling(dimensions=body.dimensions, normalize=body.use_activation)
    wanted = pooling_request(context, request, new_id("embd"), prompts, (pooling,) * len(prompts), body)
    num_tokens, maximum = sum(map(len, prompts)), context.config.options.max_answer_bytes

    async def build_body(vectors: list[Values]) -> dict[str, Any] | VectorBytes:
        answer = {
            "id": shown_id(wanted.request_id, request, body.request_id),
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0},
        }
        return await encode_answer(answer, vectors, (None,) * len(vectors), "embedding", body, maximum)

    return PooledResponse(context, wanted, build_body)
