"""The body of /v1/responses: OpenAI's fields, and those that vLLM's route has in addition."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints, WithJsonSchema

from scheduler.api.body import Body
from scheduler.api.field_schemas import AnyObject
from scheduler.api.generation_body import SamplingBody
from scheduler.api.refusals import WITH_TOOLS_NOT_SERVED, Refusal

LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "message.output_text.logprobs", "reasoning.encrypted_content", "code_interpreter_call.outputs",
    "computer_call_output.output.image_url", "file_search_call.results", "message.input_image.image_url",
    "web_search_call.action.sources", "web_search_call.results",
]  # fmt: skip
"""Only the first has an effect: answers never have the other parts."""

_Schema = dict[str, Any]
_NULL: _Schema = {"type": "null"}
_TEXT: _Schema = {"type": "string"}
_ITEM: _Schema = {
    "type": "object",
    "properties": {
        "type": {"enum": ["message", "function_call", "function_call_output", "reasoning"]},
        "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": {"type": "object"}}, _NULL]},
    },
}
_TOOL: _Schema = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {
        "type": {"const": "function"},
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]+$", "maxLength": 64},
        "description": {"anyOf": [_TEXT, _NULL]},
        "parameters": {"anyOf": [{"type": "object"}, _NULL]},
        "strict": {"anyOf": [{"type": "boolean"}, _NULL]},
    },
}
_CHOICE: _Schema = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["function", "allowed_tools"]},
        "name": _TEXT,
        "mode": {"enum": ["auto", "required"]},
        "tools": {"type": "array", "items": {"type": "object"}},
    },
}
_ITEMS: _Schema = {"type": "array", "items": _ITEM, "minItems": 1}
_AnyInput = Annotated[Any, WithJsonSchema({"anyOf": [_TEXT, _ITEMS, _NULL]})]
_AnyTools = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "array", "items": _TOOL}, _NULL]})]
_AnyToolChoice = Annotated[
    Any, WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, _CHOICE, _NULL]})
]  # fmt: skip
_Count = Annotated[int, Field(ge=1, lt=2**63)]
_NoteName = Annotated[str, StringConstraints(max_length=64)]
_Note = Annotated[str, StringConstraints(max_length=512)]


class TextFormatBody(Body):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class TextBody(Body):
    """`text`; `verbosity` has no effect."""

    format: TextFormatBody | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningBody(Body):
    """`reasoning`; there are no summaries."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesBody(SamplingBody):
    """The body of /v1/responses. `max_output_tokens` defaults to the rest of the context."""

    not_served: ClassVar[Mapping[str, Refusal]] = WITH_TOOLS_NOT_SERVED | {
        "max_tokens": ((), "it is max_output_tokens here"),
        "max_completion_tokens": ((), "it is max_output_tokens here"),
        "response_format": ((), "it is text.format here"),
        "n": ((1,), "there is one answer"),
        "prompt": ((), "prompt templates are not stored: send instructions and input"),
        "conversation": ((), "conversations are not stored: send their items as input"),
        "context_management": (([],), "items are not compacted: truncation auto drops the oldest"),
        "moderation": ((), "texts are not moderated"),
        "previous_input_messages": (([],), "send the items of the conversation as input"),
    }

    input: _AnyInput = None
    instructions: str | None = None
    tools: _AnyTools = None
    tool_choice: _AnyToolChoice = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: _Count | None = None
    text: TextBody | None = None
    reasoning: ReasoningBody | None = None
    include_reasoning: bool | None = None
    include: list[Includable] | None = None
    top_logprobs: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    max_output_tokens: _Count | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    metadata: Annotated[dict[_NoteName, _Note], Field(max_length=16)] | None = None
    safety_identifier: Annotated[str, StringConstraints(max_length=128)] | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    stream_options: AnyObject = None
    enable_response_messages: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def has_logprobs(self) -> bool:
        """Whether texts have the log probabilities of their tokens."""
        return LOGPROBS in (self.include or ())
