"""JSON schemas in the OpenAPI document for fields that are validated by hand, for better error messages."""

from typing import Annotated, Any

from pydantic import WithJsonSchema

_Schema = dict[str, Any]


def _any_of(*kinds: _Schema) -> _Schema:
    return {"anyOf": list(kinds)}


def _array_of(item: _Schema) -> _Schema:
    return {"type": "array", "items": item, "minItems": 1}


_NULL: _Schema = {"type": "null"}
_TEXT: _Schema = {"type": "string", "minLength": 1}
_IDS: _Schema = _array_of({"type": "integer", "minimum": 0})
_PART: _Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_MESSAGE: _Schema = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"type": "string", "minLength": 1, "maxLength": 64},
        "content": _any_of({"type": "string"}, _array_of(_PART)),
        "name": {"type": "string"},
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
_FORMS = (_TEXT, _array_of(_TEXT), _IDS, _array_of(_IDS))

AnyPrompt = Annotated[Any, WithJsonSchema(_any_of(*_FORMS, _NULL))]
AnyTexts = Annotated[Any, WithJsonSchema(_any_of(_TEXT, _array_of(_TEXT)))]
AnyMessages = Annotated[Any, WithJsonSchema(_any_of(_array_of(_MESSAGE), _NULL))]
AnyStop = Annotated[Any, WithJsonSchema(_any_of(_TEXT, _array_of(_TEXT), _NULL))]
AnyStopping = Annotated[Any, WithJsonSchema(_any_of({"type": "boolean"}, {"const": "never"}, _NULL))]
AnyFormat = Annotated[Any, WithJsonSchema(_any_of(_FORMAT, _NULL))]
AnySchema = Annotated[Any, WithJsonSchema(_any_of({"type": "string"}, {"type": "object"}, _NULL))]
AnyObject = Annotated[Any, WithJsonSchema(_any_of({"type": "object"}, _NULL))]
