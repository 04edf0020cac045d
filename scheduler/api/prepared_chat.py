"""The common part of all routes that answer a conversation: rendered, tokenised, checked, and not yet run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from scheduler.api.answer_shape import AnswerShape
from scheduler.api.generation import Generation
from scheduler.api.generation_body import GenerationBody
from scheduler.api.prepared_request import PreparedRequest, prepare_generation
from scheduler.api.reasoning import chat_start, reasoning_options
from scheduler.api.request_ids import new_id, shown_id
from scheduler.api.structured import Constraint
from scheduler.api.tool_calls import call_options, forced_constraint
from scheduler.app_context import AppContext
from scheduler.images.image_part import images_in
from scheduler.images.worker_chat import worker_chat
from scheduler.reasoning.options import ReasoningOptions
from scheduler.templates.chat_options import ChatOptions
from scheduler.tools.call_options import CallOptions
from scheduler.tools.choice import ToolChoice
from wire.errors import InvalidRequest, Unavailable


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation in the form of chat templates, and what its answer may be: calls, or text with a `constraint`.

    `include_reasoning`: the client gets the thinking too; `separate_reasoning`: in a field of its own.
    """

    messages: Sequence[Mapping[str, Any]]
    options: ChatOptions
    choice: ToolChoice
    constraint: Constraint | None = None
    include_reasoning: bool = True
    separate_reasoning: bool = True


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A checked request whose answer has no format yet; `answer_id` is the id that the client sees."""

    prepared: PreparedRequest
    request_id: str
    answer_id: str
    calls: CallOptions | None
    reasoning: ReasoningOptions | None

    def generation(self, shape: AnswerShape, *, echo: tuple[str, ...] = ()) -> Generation:
        """Return the response in the format of `shape`; `echo` is the text before each choice."""
        return self.prepared.generation(self.request_id, shape, echo=echo, calls=self.calls, reasoning=self.reasoning)


async def prepare_conversation(
    context: AppContext, body: GenerationBody, request: Request, conversation: Conversation, id_kind: str
) -> PreparedChat:
    """Render and tokenise a conversation whose images are loaded, and check what needs the model.

    Raises a PdserveError.

    `id_kind` is the prefix of the answer's id.
    """
    choice, messages = conversation.choice, conversation.messages
    paths = {f"images.{index}": image.path for index, image in enumerate(images_in(messages))}
    request.scope["state"]["image_paths"] = paths  # instances name images by their index
    made = await context.tokens.chat_prompt(messages, conversation.options)
    prompt, chat = made.token_ids, None
    if paths and context.images is not None and context.images.has_workers():
        chat = worker_chat(messages, conversation.options, context.tokens.default_kwargs)
    if paths and chat is None and not made.images:
        raise Unavailable("the workers that take images have left since the images were loaded")
    if not prompt:
        raise InvalidRequest("the chat template rendered the messages as an empty prompt", "messages")
    start = await chat_start(context, messages, conversation.options, prompt)
    prepared = await prepare_generation(
        context, body, request, [prompt],
        default_max_tokens=context.max_output(len(prompt), body.best_of or body.n or 1),
        param="messages", continues_prompt=False, forced=forced_constraint(choice) or conversation.constraint,
        chat=start, images=made.images, worker_chat=chat,
    )  # fmt: skip
    request_id = new_id(id_kind)
    answer_id = shown_id(request_id, request, body.request_id)
    calls = call_options(choice, context.call_parser, answer_id, prompt)
    reasoning = reasoning_options(
        context, start, prepared.params, include=conversation.include_reasoning,
        has_calls=calls is not None and not calls.forced, separate=conversation.separate_reasoning,
    )  # fmt: skip
    return PreparedChat(prepared, request_id, answer_id, calls, reasoning)
