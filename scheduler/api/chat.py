"""POST /v1/chat/completions."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from starlette.requests import Request

from scheduler.api.answer_options import AnswerOptions
from scheduler.api.answer_shape import ANSWER_NULLS, CHOICE_NULLS, CompleteChoice, PromptReport, Usage
from scheduler.api.conversation import ConversationBody
from scheduler.api.generation import Generation
from scheduler.api.generation_body import ChatBody
from scheduler.api.images import load_images
from scheduler.api.logprobs import TokenFormatter, scored_output, scored_prompt
from scheduler.api.messages import read_messages, text_of
from scheduler.api.prepared_chat import Conversation, prepare_conversation
from scheduler.api.read_body import read_body
from scheduler.api.request_ids import created_at
from scheduler.api.sse import SSE, event
from scheduler.api.tool_calls import calls_in_delta, calls_in_message, tools_of_chat
from scheduler.app_context import AppContext
from scheduler.templates.chat_options import ChatOptions
from scheduler.text.pieces import TextPiece
from scheduler.tools.call_options import CallOptions
from scheduler.tools.definitions import Tool
from wire.errors import InvalidRequest

_ASSISTANT = "assistant"


async def create_chat_completion(context: AppContext, request: Request) -> Generation:
    """Return the response that will run one request. Raises a PdserveError or HttpError if the request is invalid."""
    return await prepare_chat(context, await read_body(context, request, ChatBody), request)


async def prepare_chat(context: AppContext, body: ChatBody, request: Request) -> Generation:
    """Render, tokenise and check a body."""
    model = context.model_named(body.model)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
    messages = read_messages(body.messages)
    tools, choice = tools_of_chat(body, context.call_parser)
    conversation = Conversation(
        await load_images(context, request, messages, body.cache_salt), chat_options(body, tools), choice,
        include_reasoning=body.include_reasoning is not False,
        separate_reasoning=body.separate_reasoning is not False,
    )  # fmt: skip
    chat = await prepare_conversation(context, body, request, conversation, "chatcmpl")
    begins_message = conversation.options.add_generation_prompt
    role = context.config.options.response_role if begins_message else messages[-1]["role"]
    prepared = chat.prepared
    shape = ChatShape(
        chat.answer_id, model, role, prepared.formatter, prepared.options, chat.calls, legacy=choice.legacy,
        reasons=chat.reasoning is not None and conversation.separate_reasoning, created=created_at(request),
    )  # fmt: skip
    return chat.generation(shape, echo=_echoed_text(body, messages, role))


def chat_options(body: ConversationBody, tools: Sequence[Tool] = ()) -> ChatOptions:
    """Return how to render the conversation. Raises InvalidRequest for two options that exclude each other."""
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt cannot both be true: one continues the last message, "
            "the other begins a new one",
            "continue_final_message",
        )
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        kwargs.setdefault("enable_thinking", body.reasoning_effort != "none")
        if body.reasoning_effort == "none":
            kwargs.setdefault("thinking", False)
    return ChatOptions(
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
        add_special_tokens=bool(body.add_special_tokens),
        continue_final_message=continues,
        template=body.chat_template,
        template_kwargs=kwargs,
        documents=tuple(body.documents or ()),
        tools=tools or None,
    )


def _echoed_text(body: ChatBody, messages: Sequence[Mapping[str, Any]], role: str) -> tuple[str, ...]:
    """Return the text of the last message if `echo` is set and it has the role of the answer."""
    last = messages[-1]
    return (text_of(last["content"]),) if body.echo and last["role"] == role else ()


class ChatShape:
    """Builds chat.completion objects, and chat.completion.chunk ones while streaming."""

    stream_format = SSE

    def __init__(
        self, answer_id: str, model: str, role: str, formatter: TokenFormatter, options: AnswerOptions,
        calls: CallOptions | None = None, *, created: int, legacy: bool = False, reasons: bool = False,
    ) -> None:  # fmt: skip
        """`legacy`: calls are a `function_call`. `reasons`: the text is separated from the thinking."""
        self._head = {
            "id": answer_id, "object": "chat.completion.chunk", "created": created, "model": model,
        }  # fmt: skip
        self._role = role
        self._formatter = formatter
        self._options = options
        self._legacy = legacy
        self._reasons = reasons
        self._no_content = "" if calls is None or calls.forced else None  # the content next to calls, as in vLLM
        self._is_plain = options.logprobs is None and not options.token_ids and calls is None
        self._before: dict[int, bytes] = {}

    def opening(self, index: int, prompt: PromptReport, usage: Usage | None) -> bytes:
        """Return the event with the role."""
        choice = {
            "index": index, "delta": {"role": self._role, "content": ""}, "logprobs": None, "finish_reason": None,
        }  # fmt: skip
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._options.token_ids:
            chunk["prompt_token_ids"] = list(prompt.token_ids)
        return event(chunk if usage is None else chunk | {"usage": usage})

    def event(self, piece: TextPiece, prompt: PromptReport, usage: Usage | None) -> bytes:
        """Return the event of a text chunk; in the common case by concatenating bytes."""
        if self._is_plain and usage is None and piece.finish_reason is None and not piece.reasoning:
            before = self._before.get(piece.index) or self._event_prefix(piece.index)
            return before + orjson.dumps(piece.text) + _AFTER_CONTENT
        delta = _reasoning_fields(piece.reasoning)
        if piece.text:
            delta["content"] = piece.text
        if piece.calls:
            delta |= calls_in_delta(piece.calls, legacy=self._legacy)
        choice: dict[str, Any] = {
            "index": piece.index,
            "delta": delta,
            "logprobs": self.logprobs(piece, prompt),
            "finish_reason": piece.finish_reason,
        }
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        if self._options.token_ids:
            choice["token_ids"] = [token_id for token_id, _ in scored_output(piece.tokens)]
        chunk = {**self._head, "choices": [choice]}
        return event(chunk if usage is None else chunk | {"usage": usage})

    def logprobs(self, piece: TextPiece, prompt: PromptReport) -> dict[str, list[Any]] | None:
        """Return the log probabilities of a piece's tokens, None if not requested."""
        return None if self._options.logprobs is None else self._formatter.chat(scored_output(piece.tokens))

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """Return the last chunk."""
        return self._head | {"choices": [], "usage": usage}

    def whole(self, choices: list[CompleteChoice], prompts: Sequence[PromptReport], usage: Usage) -> dict[str, Any]:
        """Return the complete answer."""
        answer = self._head | ANSWER_NULLS | _NULLS | {
            "object": "chat.completion", "choices": [self._choice_object(one) for one in choices], "usage": usage,
        }  # fmt: skip
        prompt = prompts[0]
        if self._options.prompt_logprobs is not None:
            formatter = TokenFormatter(self._formatter.texts, self._options.prompt_logprobs)
            answer["prompt_logprobs"] = formatter.prompt(scored_prompt(prompt.token_ids, prompt.logprobs))
        if self._options.token_ids:
            answer["prompt_token_ids"] = list(prompt.token_ids)
        return answer

    def _choice_object(self, one: CompleteChoice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self._role, "content": one.text} | _MESSAGE_NULLS
        if self._reasons:
            message |= {"content": one.text or None} | _reasoning_fields(one.reasoning)
        if one.calls:
            message |= {"content": one.text or self._no_content} | calls_in_message(one.calls, legacy=self._legacy)
        choice: dict[str, Any] = CHOICE_NULLS | {
            "index": one.index,
            "message": message,
            "logprobs": one.logprobs,
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        if self._options.token_ids:
            choice["token_ids"] = one.token_ids
        return choice

    def _event_prefix(self, index: int) -> bytes:
        choice = b'"choices":[{"index":%d,"delta":{"content":' % index
        self._before[index] = b"data: " + orjson.dumps(self._head)[:-1] + b"," + choice
        return self._before[index]


def _reasoning_fields(text: str) -> dict[str, Any]:
    """Return the thinking under vLLM's current name, and under the older one that clients of vLLM and DeepSeek read."""
    return {"reasoning": text, "reasoning_content": text} if text else {}


_NULLS = dict.fromkeys(("prompt_logprobs", "prompt_token_ids", "prompt_text"))
_MESSAGE_NULLS = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
_AFTER_CONTENT = b'},"logprobs":null,"finish_reason":null}]}\n\n'
