"""POST /v1/embeddings: one vector per text."""

import asyncio
import base64
import sys
import time
from array import array
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field
from starlette.requests import Request

from scheduler.api.chat import chat_options
from scheduler.api.conversation import ConversationBody
from scheduler.api.field_schemas import AnyPrompt
from scheduler.api.inputs import encode_inputs, fitting, read_inputs
from scheduler.api.messages import read_messages
from scheduler.api.pooled_response import PooledResponse, pooling_request
from scheduler.api.pooling_body import PoolingBody
from scheduler.api.read_body import read_body
from scheduler.api.request_ids import new_id, shown_id
from scheduler.app_context import AppContext
from scheduler.tokenizer.truncation import truncate_prompt
from scheduler.vectors import Values
from wire.errors import InvalidRequest
from wire.types import Pooling

_AT_ONCE = 16  # vectors serialised before yielding to the event loop


class EmbeddingBody(ConversationBody, PoolingBody):
    """The body of /v1/embeddings: `input`, or `messages` in the model's chat template."""

    input: AnyPrompt = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    add_generation_prompt: bool | None = False


async def create_embedding(context: AppContext, request: Request) -> PooledResponse:
    """Return the response to one request, not yet run. Raises a PdserveError or HttpError for an invalid one."""
    return await prepare_embedding(context, await read_body(context, request, EmbeddingBody), request)


async def prepare_embedding(context: AppContext, body: EmbeddingBody, request: Request) -> PooledResponse:
    """Tokenise and check a body."""
    model = context.model_named(body.model)
    prompts = await _prompts(context, body)
    poolings = (Pooling(dimensions=body.dimensions),) * len(prompts)
    wanted = pooling_request(context, request, new_id("embd"), prompts, poolings, body)
    num_tokens, maximum = sum(map(len, prompts)), context.config.options.max_answer_bytes

    async def build_body(vectors: list[Values]) -> dict[str, Any]:
        return {
            "id": shown_id(wanted.request_id, request, body.request_id),
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": await _encode_vector(vectors, as_base64=body.encoding_format == "base64", max_bytes=maximum),
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0},
        }

    return PooledResponse(context, wanted, build_body)


async def _prompts(context: AppContext, body: EmbeddingBody) -> tuple[tuple[int, ...], ...]:
    tokens, keep, side = context.tokens, body.truncate_prompt_tokens, body.truncation_side or "left"
    if (body.input is None) is (body.messages is None):
        raise InvalidRequest("specify either input or messages", "input")
    if body.messages is None:
        longest = tokens.max_model_len if keep is None else None
        inputs = read_inputs(body.input, max_inputs=context.config.options.max_inputs, longest=longest)
        add_special = body.add_special_tokens is not False
        return await encode_inputs(inputs, tokens, add_special_tokens=add_special, keep=keep, side=side)
    ids = await tokens.encode_chat(read_messages(body.messages), chat_options(body))
    return (fitting(truncate_prompt(ids, keep, room=tokens.max_model_len, side=side), tokens, "messages"),)


async def _encode_vector(vectors: list[Values], *, as_base64: bool, max_bytes: int) -> list[orjson.Fragment]:
    """Return the serialised `data` of the answer; yields to the event loop between batches of vectors."""
    written, num_bytes = [], 0
    for index, values in enumerate(vectors):
        embedding = _to_base64(values) if as_base64 else values
        content = orjson.dumps({"object": "embedding", "index": index, "embedding": embedding})
        num_bytes += len(content)
        if num_bytes > max_bytes:
            raise InvalidRequest(
                f"{len(vectors)} vectors are more than {max_bytes} bytes (--max-answer-bytes): request fewer at a "
                "time, fewer dimensions or base64",
                "input",
            )
        written.append(orjson.Fragment(content))
        if index % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(0)
    return written


def _to_base64(values: Values) -> str:
    """Return little-endian float32 as base64, the encoding that OpenAI's client decodes."""
    numbers = array("f", values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
