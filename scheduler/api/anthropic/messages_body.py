"""The bodies of /v1/messages and /v1/messages/count_tokens.

The fields are Anthropic's, those of vLLM's route (cache_salt and chat_template_kwargs), and seed.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from scheduler.api.body import Body, Salt, bounds
from scheduler.api.refusals import WITH_TOOLS_NOT_SERVED, Refusal

_Schema = dict[str, Any]
_NULL: _Schema = {"type": "null"}
_TEXT: _Schema = {"type": "string"}
_BLOCK: _Schema = {"type": "object", "required": ["type"], "properties": {"type": _TEXT}}
_CONTENT: _Schema = {"anyOf": [_TEXT, {"type": "array", "items": _BLOCK}]}
_MESSAGE: _Schema = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": _CONTENT},
}
_TOOL: _Schema = {
    "type": "object",
    "required": ["name", "input_schema"],
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]+$", "maxLength": 128},
        "description": _TEXT,
        "input_schema": {"type": "object"},
    },
}

_AnyMessages = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "array", "items": _MESSAGE, "minItems": 1}, _NULL]})
]  # fmt: skip
_AnySystem = Annotated[Any, WithJsonSchema({"anyOf": [*_CONTENT["anyOf"], _NULL]})]
_AnyTools = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "array", "items": _TOOL}, _NULL]})]


class ToolChoiceBody(Body):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingBody(Body):
    """`thinking`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None


class OutputFormatBody(Body):
    """`output_config.format`."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfigBody(Body):
    """`output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormatBody | None = None


class CountTokensBody(Body):
    """The fields that become a prompt."""

    not_served: ClassVar[Mapping[str, Refusal]] = WITH_TOOLS_NOT_SERVED | {
        "mcp_servers": (([],), "the server calls no MCP servers: send their tools in `tools`"),
        "container": ((), "the server runs no code"),
        "thread": ((), "conversations are not stored: send all their messages"),
    }

    model: str | None = None
    messages: _AnyMessages = None
    system: _AnySystem = None
    tools: _AnyTools = None
    tool_choice: ToolChoiceBody | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfigBody | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountTokensBody):
    """The body of /v1/messages: the prompt's fields, and the ones that control the answer."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, bounds("temperature")] | None = None
    top_p: Annotated[float, bounds("top_p")] | None = None
    top_k: Annotated[int, bounds("top_k")] | None = None
    seed: Annotated[int, bounds("seed")] | None = None
    cache_salt: Salt | None = None
