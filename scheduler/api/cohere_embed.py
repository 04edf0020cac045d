"""POST /v2/embed, the API of Cohere: a vector for each text, in one or several types."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from starlette.requests import Request

from scheduler.api.embeddings import Dimensions
from scheduler.api.inputs import encode_inputs, read_texts
from scheduler.api.pooled_response import PooledResponse, pooling_request
from scheduler.api.pooling_body import PoolingBody
from scheduler.api.read_body import read_body
from scheduler.api.refusals import COHERE_NOT_SERVED, Refusal
from scheduler.api.request_ids import new_id, shown_id
from scheduler.api.vector_data import VectorType, encode_types
from scheduler.app_context import AppContext
from scheduler.vectors import Values
from wire.errors import InvalidRequest
from wire.types import Pooling


class CohereEmbedBody(PoolingBody):
    """The body of /v2/embed. Texts longer than `max_tokens`, or than the model accepts, are cut as `truncate` says."""

    not_served: ClassVar[Mapping[str, Refusal]] = COHERE_NOT_SERVED

    texts: list[str] | None = None
    inputs: list[dict[str, Any]] | None = None
    input_type: Literal["search_document", "search_query", "classification", "clustering"] | None = None
    embedding_types: Annotated[list[VectorType], Field(min_length=1)] | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    output_dimension: Dimensions | None = None


async def create_cohere_embedding(context: AppContext, request: Request) -> PooledResponse:
    """Return the response to one request, not yet run. Raises a PdserveError or HttpError for an invalid one."""
    body = await read_body(context, request, CohereEmbedBody)
    name, texts = _texts(body, context.config.options.max_inputs)
    prompts = await encode_inputs(texts, context.tokens, add_special_tokens=True, param=name, **_cut(body, context))
    pooling = Pooling(dimensions=body.output_dimension, normalize=body.use_activation)
    wanted = pooling_request(context, request, new_id("embd"), prompts, (pooling,) * len(prompts), body)
    types = tuple(dict.fromkeys(body.embedding_types or ("float",)))
    num_tokens, maximum = sum(map(len, prompts)), context.config.options.max_answer_bytes

    async def build_body(vectors: list[Values]) -> dict[str, Any]:
        return {
            "id": shown_id(wanted.request_id, request, body.request_id),
            "response_type": "embeddings_by_type",
            "embeddings": await encode_types(vectors, types, max_bytes=maximum),
            "texts": texts,
            "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": num_tokens}},
        }

    return PooledResponse(context, wanted, build_body)


def _texts(body: CohereEmbedBody, maximum: int) -> tuple[str, tuple[str, ...]]:
    """Return the texts and the field that has them."""
    if (body.texts is None) is (body.inputs is None):
        raise InvalidRequest("specify either texts or inputs", "texts")
    if body.texts is not None:
        return "texts", read_texts(body.texts, "texts", max_inputs=maximum)
    texts = [_text(one, f"inputs.{index}") for index, one in enumerate((body.inputs or [])[: maximum + 1])]
    return "inputs", read_texts(texts, "inputs", max_inputs=maximum)


def _text(value: Mapping[str, Any], path: str) -> str:
    """Return the text of an input, whose content is a list of text parts."""
    parts = value.get("content")
    if not isinstance(parts, list) or not parts:
        raise InvalidRequest(f"{path}.content must be a list of text parts", f"{path}.content")
    for index, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            where = f"{path}.content.{index}"
            raise InvalidRequest(f'{where} must be {{"type": "text", "text": …}}: only texts have vectors here', where)
    return "".join(part["text"] for part in parts)


def _cut(body: CohereEmbedBody, context: AppContext) -> dict[str, Any]:
    """Return how many tokens of a text are kept, and which side of it is cut."""
    longest = context.tokens.max_model_len
    if body.truncate == "NONE":
        return {"keep": None}
    return {"keep": min(body.max_tokens or longest, longest), "side": "left" if body.truncate == "START" else "right"}
