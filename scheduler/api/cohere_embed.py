"""POST /v2/embed, the API of Cohere: a vector for each text, in several types at once."""

import asyncio
import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field
from starlette.requests import Request

from scheduler.api.body import Body, Priority
from scheduler.api.embeddings import Dimensions, check_dimensions
from scheduler.api.inputs import encode_inputs, read_texts
from scheduler.api.pooled_response import PooledResponse, pooling_request
from scheduler.api.pooling_body import PoolingBody
from scheduler.api.read_body import read_body
from scheduler.api.request_ids import new_id, shown_id
from scheduler.api.vector_bytes import to_bytes
from scheduler.app_context import AppContext
from scheduler.vectors import Values
from wire.errors import InvalidRequest, PromptTooLong
from wire.types import Pooling

EmbeddingType = Literal["float", "base64", "binary", "ubinary"]


class TextContent(Body):
    """A part of an input."""

    type: Literal["text"]
    text: str


class EmbedInput(Body):
    """An input, whose texts are concatenated."""

    content: list[TextContent]


class CohereEmbedBody(Body):
    """The body of /v2/embed."""

    model: str | None = None
    input_type: str | None = None
    texts: list[str] | None = None
    inputs: list[EmbedInput] | None = None
    images: list[str] | None = None
    embedding_types: list[EmbeddingType] | None = None
    output_dimension: Dimensions | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    priority: Priority | None = None


async def create_cohere_embedding(context: AppContext, request: Request) -> PooledResponse:
    """Return the response that will run one request. Raises a PdserveError or HttpError if the request is invalid."""
    body = await read_body(context, request, CohereEmbedBody)
    context.model_named(body.model)
    check_dimensions(context, body.output_dimension, "output_dimension")
    texts = _texts(body, context)
    prompts = await _prompts(context, body, [_prefix(body.input_type, context) + text for text in texts])
    types, maximum = body.embedding_types or ["float"], context.config.options.max_answer_bytes
    pooled = PoolingBody(priority=body.priority)
    poolings = (Pooling(dimensions=body.output_dimension),) * len(prompts)
    wanted = pooling_request(context, request, new_id("embd"), prompts, poolings, pooled)

    async def build_body(vectors: list[Values]) -> dict[str, Any]:
        return {
            "id": shown_id(wanted.request_id, request, None),
            "embeddings": await _embeddings(vectors, dict.fromkeys(types), maximum),
            "texts": list(texts) if body.texts is not None else None,
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"input_tokens": sum(map(len, prompts)), "image_tokens": 0},
            },
            "response_type": "embeddings_by_type",
        }

    return PooledResponse(context, wanted, build_body)


def _texts(body: CohereEmbedBody, context: AppContext) -> tuple[str, ...]:
    if body.images:
        raise InvalidRequest("images: the model reads only text", "images")
    if (body.texts is None) is (body.inputs is None):
        raise InvalidRequest("specify either texts or inputs", "texts")
    if body.texts is not None:
        return read_texts(body.texts, "texts", max_inputs=context.config.options.max_inputs)
    joined = ["".join(part.text for part in one.content) for one in body.inputs or ()]
    return read_texts(joined, "inputs", max_inputs=context.config.options.max_inputs)


def _prefix(input_type: str | None, context: AppContext) -> str:
    """Return what the model expects before a text of this type."""
    prompts = context.tokens.files.prompts
    if input_type is not None and input_type not in prompts:
        known = f"the model knows {', '.join(prompts)}" if prompts else "the model has no instructions for input types"
        raise InvalidRequest(f"Unsupported input_type {input_type[:100]!r}: {known}", "input_type")
    return prompts.get(input_type or "", "")


async def _prompts(context: AppContext, body: CohereEmbedBody, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ids of each text, cut as requested; with NONE a text that is too long is refused."""
    tokens, limit = context.tokens, min(body.max_tokens or context.tokens.max_model_len, context.tokens.max_model_len)
    param = "inputs" if body.texts is None else "texts"
    keep, side = None if body.truncate == "NONE" else limit, "left" if body.truncate == "START" else "right"
    found = await encode_inputs(texts, tokens, add_special_tokens=True, keep=keep, side=side, param=param)
    for ids in found:
        if len(ids) > limit:
            raise PromptTooLong(f"a text has {len(ids)} tokens, but max_tokens is {limit}", param)
    return found


async def _embeddings(
    vectors: Sequence[Values], types: Mapping[EmbeddingType, None], max_bytes: int
) -> dict[str, list[orjson.Fragment]]:
    """Return the vectors in each type. Raises InvalidRequest if they take too many bytes."""
    written: dict[str, list[orjson.Fragment]] = {kind: [] for kind in types}
    num_bytes = 0
    for values in vectors:
        for kind in types:
            content = orjson.dumps(_written(values, kind))
            num_bytes += len(content)
            written[kind].append(orjson.Fragment(content))
        if num_bytes > max_bytes:
            raise InvalidRequest(
                f"{len(vectors)} vector{' takes' if len(vectors) == 1 else 's take'} more than {max_bytes} bytes "
                "(--max-answer-bytes): request fewer at a time, or fewer types or dimensions",
                "texts",
            )
        await asyncio.sleep(0)
    return written


def _written(values: Values, kind: EmbeddingType) -> Sequence[float] | str:
    if kind == "float":
        return values
    if kind == "base64":
        return base64.b64encode(to_bytes(values, "float32", "little")).decode()
    return _bits(values, signed=kind == "binary")


def _bits(values: Values, *, signed: bool) -> list[int]:
    """Pack one bit for each value, 1 if it is not negative, into eight-bit numbers, the first value's bit highest."""
    if len(values) % 8:
        raise InvalidRequest(
            f"binary vectors need a multiple of 8 dimensions, but these have {len(values)}", "embedding_types"
        )
    numbers = [
        sum((value >= 0) << 7 - place for place, value in enumerate(values[at : at + 8]))
        for at in range(0, len(values), 8)
    ]
    return [number - 128 for number in numbers] if signed else numbers
