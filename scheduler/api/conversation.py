"""The fields that control how `messages` become a prompt, for routes that generate no text."""

from typing import Annotated, Any

from pydantic import Field

from scheduler.api.body import Body
from scheduler.api.field_schemas import AnyMessages


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
