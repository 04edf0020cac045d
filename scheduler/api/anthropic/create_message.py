"""POST /v1/messages and /v1/messages/count_tokens: chats in Anthropic's format."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from scheduler.api.anthropic.blocks import Message, continues_answer, read_conversation
from scheduler.api.anthropic.message_shape import MessageShape
from scheduler.api.anthropic.messages_body import CountTokensBody, MessagesBody
from scheduler.api.chat import chat_options
from scheduler.api.errors import json_response
from scheduler.api.generation import Generation
from scheduler.api.generation_body import ChatBody, StreamOptions
from scheduler.api.images import load_images
from scheduler.api.prepared_chat import Conversation, prepare_conversation
from scheduler.api.read_body import read_body
from scheduler.api.reasoning import can_limit_thinking
from scheduler.api.structured import Constraint
from scheduler.app_context import AppContext
from scheduler.templates.chat_options import ChatOptions
from scheduler.tools.choice import ChoiceMode, ToolChoice
from scheduler.tools.definitions import Tool, ToolForm, tools_in
from wire.errors import InvalidRequest
from wire.structured_output import json_output

_TOOLS = ToolForm("tools", "", "input_schema", "custom", max_name_chars=128, needs_schema=True)
_SHARED = MessagesBody.model_fields.keys() & ChatBody.model_fields.keys() - CountTokensBody.model_fields.keys()
"""The fields of the answer that chats have under the same names."""


async def create_message(context: AppContext, request: Request) -> Generation:
    """Return the response that will run one request. Raises a PdserveError or HttpError if the request is invalid."""
    body = await read_body(context, request, MessagesBody)
    model = context.model_named(body.model)
    messages, tools = read_conversation(body.messages, body.system), _tools(body)
    choice = _choice(body, tools, context.call_parser)
    options = _options(body, messages, tools)
    loaded = await load_images(context, request, messages, body.cache_salt)
    conversation = Conversation(loaded, options, choice, _constraint(body))
    chat = await prepare_conversation(context, _sampling_body(context, body), request, conversation, "msg")
    return chat.generation(MessageShape(chat.answer_id, model))


async def count_tokens(context: AppContext, request: Request) -> Response:
    """Return the number of tokens that /v1/messages would compute or find cached for the same body."""
    body = await read_body(context, request, CountTokensBody)
    context.model_named(body.model)
    messages = read_conversation(body.messages, body.system)
    options = _options(body, messages, _tools(body))
    prompt = await context.tokens.encode_chat(await load_images(context, request, messages, counts=True), options)
    return json_response({"input_tokens": len(prompt)})


class _SamplingBody(ChatBody):
    """The fields that sampling and stopping read, under the names that chats use."""

    @property
    def stop_field(self) -> str:
        """`stop_sequences`."""
        return "stop_sequences"

    @property
    def counts_cached(self) -> bool:
        """True: this API's usage includes cached tokens."""
        return True


def _thinking_budget(context: AppContext, body: MessagesBody) -> int | None:
    """Return the limit on thinking tokens; None if the client set none, or if nothing can enforce it."""
    thinking = body.thinking
    budget = thinking.budget_tokens if thinking is not None and thinking.type == "enabled" else None
    if budget is not None and budget >= body.max_tokens:
        raise InvalidRequest(
            f"thinking.budget_tokens is {budget}, but must be less than max_tokens, {body.max_tokens}",
            "thinking.budget_tokens",
        )
    return budget if can_limit_thinking(context) else None


def _sampling_body(context: AppContext, body: MessagesBody) -> ChatBody:
    shared = {name: getattr(body, name) for name in _SHARED}
    shared["max_tokens"] = min(body.max_tokens, context.tokens.max_model_len)  # it is required: clients send large ones
    return _SamplingBody.model_construct(
        **shared,
        stop=body.stop_sequences,
        stream_options=StreamOptions(include_usage=True) if body.stream else None,
        thinking_token_budget=_thinking_budget(context, body),
    )


def _options(body: CountTokensBody, messages: Sequence[Message], tools: Sequence[Tool]) -> ChatOptions:
    thinking = None if body.thinking is None else body.thinking.type
    effort = body.output_config.effort if body.output_config else None
    variables = ("enable_thinking", "thinking") if thinking in ("enabled", "disabled") else ()
    switches = dict.fromkeys(variables, thinking == "enabled")
    continues = continues_answer(messages)
    fields = ChatBody.model_construct(
        chat_template_kwargs=switches | (body.chat_template_kwargs or {}),
        reasoning_effort="none" if thinking == "disabled" else effort,
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )
    return chat_options(fields, tools)


def _tools(body: CountTokensBody) -> tuple[Tool, ...]:
    return tools_in(_TOOLS, body.tools or None)


def _choice(body: MessagesBody, tools: Sequence[Tool], parser: str | None) -> ToolChoice:
    """Return which tools the answer may or must call; auto needs a parser."""
    given = body.tool_choice
    kind = "auto" if given is None else given.type
    parallel = given is None or not given.disable_parallel_tool_use
    if not tools:
        if kind in ("any", "tool"):
            raise InvalidRequest("tool_choice needs tools", "tool_choice")
        return ToolChoice(ChoiceMode.NONE)
    if kind == "tool":
        name = None if given is None else given.name
        at = next((at for at, tool in enumerate(tools) if tool["function"]["name"] == name), None)
        if at is None:
            raise InvalidRequest(f"tool_choice.name is {name!r:.80}, which none of the tools has", "tool_choice.name")
        return ToolChoice(ChoiceMode.NAMED, (tools[at],), _TOOLS.schema_path(at), parallel=False)
    if kind == "auto" and parser is None:
        raise InvalidRequest(
            "tool_choice auto (the default) needs the format of the model's calls, but its chat template shows no "
            "known format: name one with --tool-call-parser, or use any, tool or none",
            "tool_choice",
        )
    mode = {"auto": ChoiceMode.AUTO, "any": ChoiceMode.REQUIRED, "none": ChoiceMode.NONE}[kind]
    return ToolChoice(mode, tuple(tools), _TOOLS.path_of(tools, tools), parallel=parallel)


def _constraint(body: MessagesBody) -> Constraint | None:
    output = body.output_config
    if output is None or output.format is None:
        return None
    return "output_config.format.schema", json_output(output.format.json_schema)
