"""The fields that say how `messages` become a prompt, on the routes that read them and write nothing."""

from typing import Annotated, Any

from pydantic import Field

from scheduler.api.described import AnyMessages
from scheduler.api.schemas import Body


class ConversationBody(Body):
    """`messages` and what their template is given."""

    messages: AnyMessages = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    reasoning_effort: str | None = None
