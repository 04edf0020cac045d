"""Calls forced by a grammar: the JSON schema of an answer that has only calls, and the parsers of such answers. Pure.

required  [{"name": "weather", "parameters": {"city": "Paris"}}, …]      one or more calls
named     {"city": "Paris"}                                              the arguments of one call
"""

import copy
from typing import Any

from scheduler.tools.argument_schema import subschemas
from scheduler.tools.call_object import CallObject
from scheduler.tools.call_reader import CallReader, StepParser, Steps
from scheduler.tools.choice import ChoiceMode, ToolChoice
from scheduler.tools.definitions import Tool
from scheduler.tools.deltas import ParsedText

_OPEN_FIELDS = frozenset((
    "$ref", "additionalProperties", "allOf", "anyOf", "oneOf", "patternProperties", "unevaluatedProperties",
))  # fmt: skip
"""Fields of a schema that allow or may allow properties that it does not name."""
_CALL = CallObject("parameters")


def forced_schema(choice: ToolChoice) -> dict[str, Any]:
    """Return the schema of the answer to a choice that is required or named."""
    if choice.mode is ChoiceMode.NAMED:
        return _arguments_schema(choice.tools[0])
    definitions: dict[str, Any] = {}
    calls = [_call_schema(tool, definitions) for tool in choice.tools]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not choice.parallel:
        schema["maxItems"] = 1
    return schema | {"$defs": definitions} if definitions else schema


def _call_schema(tool: Tool, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one call; a schema with references moves to `definitions`, and the references with it."""
    name, arguments = tool["function"]["name"], _arguments_schema(tool)
    referring = [part for _, part in subschemas(arguments) if "$ref" in part]
    for part in referring:
        part["$ref"] = f"#/$defs/{name}{part['$ref'][1:]}"
    if referring:
        definitions[name] = arguments
        arguments = {"$ref": f"#/$defs/{name}"}
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [name]}, "parameters": arguments},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _arguments_schema(tool: Tool) -> dict[str, Any]:
    """Return a copy of a tool's schema that allows only properties that it names, unless it may allow others."""
    schema = copy.deepcopy(tool["function"]["parameters"]) or {"properties": {}}
    schema.pop("$schema", None)
    schema.pop("$id", None)
    schema.setdefault("type", "object")
    if not schema.keys() & _OPEN_FIELDS and _has_all_required(schema):
        schema["additionalProperties"] = False
    return schema


def _has_all_required(schema: dict[str, Any]) -> bool:
    """Return whether a schema names properties, including all that it requires: then it may exclude others."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    return all(isinstance(name, str) and name in properties for name in required)


def required_calls() -> StepParser:
    """Return a parser of the list of calls."""
    return StepParser(_list_steps)


def _list_steps(reader: CallReader) -> Steps[None]:
    """Read the list; anything else, from a worker that ignores grammars, is content."""
    while True:
        reader.pending((yield from reader.run_of(" \t\r\n[],}")))
        if reader.next_sign != "{" or not (yield from _CALL.read(reader)):
            break
        reader.end_call()
    if reader.num_calls:
        yield from reader.rest_of_text()


class NamedCall:
    """Passes on the arguments of the one call as they arrive. A ToolCallParser."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> ParsedText:
        """Return what is new after `text`."""
        parsed = ParsedText()
        if text and self._name is not None:
            parsed.begin_call(0, self._name)
            self._name = None
        parsed.add_arguments(0, text)
        return parsed

    def flush(self) -> ParsedText:
        """Return nothing: no text is held back."""
        return ParsedText()
