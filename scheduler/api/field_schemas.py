"""JSON schemas in the OpenAPI document for fields that are validated by hand, for better error messages."""

from typing import Annotated, Any

from pydantic import WithJsonSchema

from scheduler.images.image_part import DETAILS, MAX_UUID_CHARS
from wire.kv_layout import ITEM_BYTES

_Schema = dict[str, Any]


def _any_of(*kinds: _Schema) -> _Schema:
    return {"anyOf": list(kinds)}


def _array_of(item: _Schema) -> _Schema:
    return {"type": "array", "items": item, "minItems": 1}


_NULL: _Schema = {"type": "null"}
_TEXT: _Schema = {"type": "string", "minLength": 1}
_IDS: _Schema = _array_of({"type": "integer", "minimum": 0})
_POSITIVE: _Schema = _array_of({"type": "integer", "minimum": 1})
_TEXT_PART: _Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_IMAGE_URL: _Schema = {
    "type": "object",
    "required": ["url"],
    "properties": {"url": _TEXT, "detail": {"enum": [*DETAILS, None]}},
}
_UUID: _Schema = {"type": "string", "maxLength": MAX_UUID_CHARS}
_IMAGE_PART: _Schema = {
    "type": "object",
    "required": ["type", "image_url"],
    "properties": {"type": {"const": "image_url"}, "image_url": _IMAGE_URL, "uuid": _UUID},
}
_KNOWN_IMAGE_PART: _Schema = {
    "type": "object",
    "required": ["type", "uuid"],
    "properties": {"type": {"const": "image_url"}, "image_url": _NULL, "uuid": _UUID | {"minLength": 1}},
}
"""An image that was sent before."""
_REFUSAL_PART: _Schema = {
    "type": "object",
    "required": ["type", "refusal"],
    "properties": {"type": {"const": "refusal"}, "refusal": {"type": "string"}},
}
_EMBEDS: _Schema = {
    "type": "object",
    "required": ["data", "dtype", "shape"],
    "properties": {
        "data": _TEXT,
        "dtype": {"enum": list(ITEM_BYTES)},
        "shape": _POSITIVE | {"minItems": 2, "maxItems": 2},
        "grid": _any_of(_POSITIVE | {"minItems": 3, "maxItems": 3}, _NULL),
    },
}
_EMBEDS_PART: _Schema = {
    "type": "object",
    "required": ["type", "image_embeds"],
    "properties": {"type": {"const": "image_embeds"}, "image_embeds": _EMBEDS},
}
_PART = _any_of(_TEXT_PART, _IMAGE_PART, _KNOWN_IMAGE_PART, _EMBEDS_PART, _REFUSAL_PART)
_NAME: _Schema = {"type": "string", "minLength": 1, "maxLength": 64}
_CALLED: _Schema = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": _NAME, "arguments": _any_of({"type": "string"}, {"type": "object"})},
}
_CALL: _Schema = {
    "type": "object",
    "required": ["function"],
    "properties": {"id": {"type": "string"}, "type": {"const": "function"}, "function": _CALLED},
}
_MESSAGE: _Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": _NAME,
        "content": _any_of({"type": "string"}, _array_of(_PART), _NULL),
        "name": {"type": "string"},
        **dict.fromkeys(("reasoning", "reasoning_content"), _any_of({"type": "string"}, _NULL)),
        "tool_calls": _any_of({"type": "array", "items": _CALL}, _NULL),
        "tool_call_id": {"type": "string"},
        "function_call": _any_of(_CALLED, _NULL),
    },
}
_FUNCTION: _Schema = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": _NAME | {"pattern": "^[A-Za-z0-9_-]+$"},
        "description": {"type": "string"},
        "parameters": {"type": "object"},
        "strict": {"type": "boolean"},
    },
}
_TOOL: _Schema = {
    "type": "object",
    "required": ["function"],
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
}
_NAMED: _Schema = {"type": "object", "required": ["name"], "properties": {"name": _NAME}}
_CHOSEN: _Schema = {
    "type": "object",
    "required": ["function"],
    "properties": {"type": {"const": "function"}, "function": _NAMED},
}
_ALLOWED: _Schema = {
    "type": "object",
    "required": ["type", "allowed_tools"],
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "required": ["mode", "tools"],
            "properties": {"mode": {"enum": ["auto", "required"]}, "tools": _array_of(_CHOSEN)},
        },
    },
}
_FORMAT: _Schema = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema", "structural_tag"]},
        "json_schema": {"type": "object"},
    },
}
_DOCUMENT: _Schema = {"type": "object", "required": ["text"], "properties": {"text": _TEXT}}
_FORMS = (_TEXT, _array_of(_TEXT), _IDS, _array_of(_IDS))

AnyPrompt = Annotated[Any, WithJsonSchema(_any_of(*_FORMS, _NULL))]
AnyTexts = Annotated[Any, WithJsonSchema(_any_of(_TEXT, _array_of(_TEXT), _NULL))]
AnyDocuments = Annotated[Any, WithJsonSchema(_any_of(_TEXT, _array_of(_any_of(_TEXT, _DOCUMENT))))]
AnyMessages = Annotated[Any, WithJsonSchema(_any_of(_array_of(_MESSAGE), _NULL))]
AnyTools = Annotated[Any, WithJsonSchema(_any_of(_array_of(_TOOL), _NULL))]
AnyFunctions = Annotated[Any, WithJsonSchema(_any_of(_array_of(_FUNCTION), _NULL))]
AnyToolChoice = Annotated[
    Any, WithJsonSchema(_any_of({"enum": ["none", "auto", "required"]}, _CHOSEN, _ALLOWED, _NULL))
]
AnyFunctionCall = Annotated[Any, WithJsonSchema(_any_of({"enum": ["none", "auto"]}, _NAMED, _NULL))]
AnyStop = Annotated[Any, WithJsonSchema(_any_of(_TEXT, _array_of(_TEXT), _NULL))]
AnyStopping = Annotated[Any, WithJsonSchema(_any_of({"type": "boolean"}, {"const": "never"}, _NULL))]
AnyFormat = Annotated[Any, WithJsonSchema(_any_of(_FORMAT, _NULL))]
AnySchema = Annotated[Any, WithJsonSchema(_any_of({"type": "string"}, {"type": "object"}, _NULL))]
AnyObject = Annotated[Any, WithJsonSchema(_any_of({"type": "object"}, _NULL))]
