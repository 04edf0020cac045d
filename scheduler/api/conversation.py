"""The fields of chats, pooling and /tokenize that control how `messages` become a prompt."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from scheduler.api.body import Body
from scheduler.api.field_schemas import AnyFunctions, AnyMessages, AnyTools
from scheduler.api.refusals import WITH_TOOLS_NOT_SERVED, Refusal


class ConversationBody(Body):
    """`messages` and the inputs of their chat template."""

    messages: AnyMessages = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    reasoning_effort: str | None = None


class ConversationWithTools(ConversationBody):
    """The same, with the tools that the template describes to the model; `functions` is their legacy form."""

    not_served: ClassVar[Mapping[str, Refusal]] = WITH_TOOLS_NOT_SERVED

    tools: AnyTools = None
    functions: AnyFunctions = None
