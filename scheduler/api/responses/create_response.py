"""POST /v1/responses and /v1/responses/input_tokens: chats in the format of OpenAI's Responses API."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from scheduler.api.chat import chat_options
from scheduler.api.errors import json_response
from scheduler.api.generation_body import ChatBody, SamplingBody, StreamOptions
from scheduler.api.images import load_images
from scheduler.api.prepared_chat import Conversation, prepare_conversation
from scheduler.api.read_body import read_body
from scheduler.api.responses.input_items import Item, continues_answer, read_conversation, read_items
from scheduler.api.responses.response_head import response_head
from scheduler.api.responses.response_shape import ResponseShape
from scheduler.api.responses.response_state import earlier_items, store_answer, store_for
from scheduler.api.responses.response_tools import read_response_tools
from scheduler.api.responses.responses_body import ResponsesBody
from scheduler.api.responses.truncation import drop_oldest
from scheduler.api.structured import Constraint
from scheduler.app_context import AppContext
from scheduler.templates.chat_options import ChatOptions
from scheduler.tools.call_options import call_origin
from scheduler.tools.definitions import Tool
from wire.errors import InvalidRequest
from wire.structured_output import json_output
from wire.types import StructuredOutput


async def create_response(context: AppContext, request: Request) -> ASGIApp:
    """Return the response that will run one request. Raises a PdserveError or HttpError if the request is invalid."""
    body = await read_body(context, request, ResponsesBody)
    model, store = context.model_named(body.model), store_for(context, body)
    with _naming_input():
        items, conversation = await _read(context, body, request)
        chat = await prepare_conversation(context, _sampling_body(context, body), request, conversation, "resp")
    (prompt,) = chat.prepared.prompts
    formatter = chat.prepared.formatter if body.has_logprobs else None
    head = response_head(body, model, chat, None if store is None else store.new_id())
    raw = functools.partial(_raw_messages, context, prompt) if body.enable_response_messages else None
    shape = ResponseShape(head, call_origin(head["id"], prompt), formatter, raw)
    generation = chat.generation(shape)
    return generation if store is None else await store_answer(store, generation, shape, items, body, request)


async def count_input_tokens(context: AppContext, request: Request) -> Response:
    """Return the number of tokens of the prompt that /v1/responses would answer for the same body."""
    body = await read_body(context, request, ResponsesBody)
    context.model_named(body.model)
    with _naming_input():
        _, conversation = await _read(context, body, request)
        prompt = await context.tokens.encode_chat(conversation.messages, conversation.options)
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt)})


class _SamplingBody(ChatBody):
    """The fields that sampling and stopping read, under the names that chats use."""

    @property
    def max_output_field(self) -> str:
        """`max_output_tokens`."""
        return "max_output_tokens"

    @property
    def counts_cached(self) -> bool:
        """True: this API's usage includes cached tokens."""
        return True


async def _read(context: AppContext, body: ResponsesBody, request: Request) -> tuple[list[Item], Conversation]:
    """Return the items, those of the previous response first, and their conversation, truncated if the body says so."""
    earlier = await earlier_items(context, body, request)
    items = [*earlier, *read_items(body.input)]
    tools, choice = read_response_tools(
        body.tools, body.tool_choice, parallel=body.parallel_tool_calls, parser=context.call_parser
    )
    options = _options(body, items, tools)
    messages: Sequence[Mapping[str, Any]] = await load_images(
        context, request, read_conversation(items, body.instructions, num_earlier=len(earlier)), body.cache_salt
    )
    if body.truncation == "auto":
        messages = await drop_oldest(context, messages, options, _sampling_body(context, body).max_tokens)
    shows_thinking = body.include_reasoning is not False
    return items, Conversation(messages, options, choice, _constraint(body), include_reasoning=shows_thinking)


@contextmanager
def _naming_input() -> Iterator[None]:
    """Make errors about the conversation's messages name the field `input`."""
    try:
        yield
    except InvalidRequest as error:
        if error.param == "messages":
            error.param = "input"
        raise


def _sampling_body(context: AppContext, body: ResponsesBody) -> ChatBody:
    limit = body.max_output_tokens
    shared = {name: getattr(body, name) for name in SamplingBody.model_fields}
    shared["return_token_ids"] = bool(body.enable_response_messages)
    shared["stream"] = streams = bool(body.stream or body.background)
    return _SamplingBody.model_construct(
        **shared,
        max_tokens=None if limit is None else min(limit, context.tokens.max_model_len),  # clients send large limits
        stream_options=StreamOptions(include_usage=True) if streams else None,
        logprobs=body.has_logprobs,
        top_logprobs=body.top_logprobs,
    )


def _raw_messages(context: AppContext, prompt: Sequence[int], output: Sequence[int]) -> dict[str, Any]:
    """Return vLLM's fields of enable_response_messages: prompt and output as tokens, and as text with its markers."""

    def raw(ids: Sequence[int]) -> list[dict[str, Any]]:
        text = context.tokens.decode(ids, skip_special_tokens=False)
        return [{"type": "raw_message_tokens", "message": text, "tokens": [*ids]}]

    return {"input_messages": raw(prompt), "output_messages": raw(output)}


def _options(body: ResponsesBody, items: Sequence[Item], tools: Sequence[Tool]) -> ChatOptions:
    continues = continues_answer(items)
    fields = ChatBody.model_construct(
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )
    return chat_options(fields, tools)


def _constraint(body: ResponsesBody) -> Constraint | None:
    wanted = None if body.text is None else body.text.format
    if wanted is None or wanted.type == "text":
        return None
    if body.structured_outputs is not None:
        raise InvalidRequest("structured_outputs and text.format both constrain the output: use one", "text.format")
    if wanted.type == "json_object":
        return "text.format", StructuredOutput("json_object", "")
    for name, value in (("name", wanted.name), ("schema", wanted.json_schema)):
        if value is None:
            raise InvalidRequest(f"text.format.{name} is missing", f"text.format.{name}")
    assert wanted.json_schema is not None
    return "text.format.schema", json_output(wanted.json_schema)
