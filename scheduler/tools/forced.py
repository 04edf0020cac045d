"""Calls forced by a grammar: the JSON schema of an answer that only calls, and the parsers of such answers. Pure.

required  [{"name": "weather", "parameters": {"city": "Paris"}}, …]      one or more calls
named     {"city": "Paris"}                                              the arguments of one call
"""

import copy
from typing import Any

from scheduler.tools.call_object import CallObject, CallState
from scheduler.tools.choice import ChoiceMode, ToolChoice
from scheduler.tools.definitions import Tool, subschemas
from scheduler.tools.deltas import ParsedText

_OPEN_FIELDS = frozenset((
    "$ref", "additionalProperties", "allOf", "anyOf", "oneOf", "patternProperties", "unevaluatedProperties",
))  # fmt: skip
"""Fields of a schema that allow or may allow properties beside those that it names."""


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
    """Return the schema of one call; a schema with references is put into `definitions`, so that they can be moved."""
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
    """Return a copy of a tool's schema for an object with the properties that it names, none if it has no schema."""
    schema = copy.deepcopy(tool["function"]["parameters"]) or {"properties": {}}
    schema.pop("$schema", None)
    schema.pop("$id", None)
    schema.setdefault("type", "object")
    if not schema.keys() & _OPEN_FIELDS and _has_all_required(schema):
        schema["additionalProperties"] = False
    return schema


def _has_all_required(schema: dict[str, Any]) -> bool:
    """Return whether a schema has properties, those that it requires among them, so that it may exclude others."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    return all(isinstance(name, str) and name in properties for name in required)


class RequiredCalls:
    """Parses the list of calls; what is none, from a worker that ignores grammars, is content. A ToolCallParser."""

    def __init__(self) -> None:
        self._call: CallObject | None = None
        self._num_calls = 0
        self._before = ""  # the first call, which is content if there is no call
        self._is_content = False
        self._is_over = False

    def push(self, text: str) -> ParsedText:
        """Return what is new after `text`."""
        parsed = ParsedText()
        while text and not self._is_content and not self._is_over:
            text = self._between(text) if self._call is None else self._within(self._call, text, parsed)
        if self._is_content:
            parsed.content, self._before = self._before + text, ""
        return parsed

    def flush(self) -> ParsedText:
        """Return the text if no call began in it; nothing of a further call that was cut before its arguments."""
        if self._num_calls or self._is_content:
            return ParsedText()
        if self._call is None:
            return ParsedText(self._before)
        return ParsedText(self._before + self._call.held if self._call.state is CallState.HEAD else "")

    def _between(self, text: str) -> str:
        """Skip the list's own signs; return the text from the next call on."""
        rest = text.lstrip(" \t\r\n[],}")
        if self._num_calls == 0:
            self._before += text[: len(text) - len(rest)]
        if rest.startswith("{"):
            self._call = CallObject(self._num_calls, "parameters")
        elif rest:
            self._end()
        return rest

    def _within(self, call: CallObject, text: str, parsed: ParsedText) -> str:
        rest = call.push(text, parsed)
        if call.state is CallState.OTHER:
            self._end()
            return call.held
        if call.state is CallState.DONE:
            self._num_calls += 1
            self._call = None
        return rest

    def _end(self) -> None:
        """Parse no further: the text is content, or if it began with calls, nothing."""
        self._is_content = self._num_calls == 0
        self._is_over = not self._is_content


class NamedCall:
    """Passes the arguments of the one call on as they come. A ToolCallParser."""

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
