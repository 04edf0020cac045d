"""Arguments of formats that write each value as plain text: the tool's schema gives its type. Pure."""

import json
import math
from collections.abc import Mapping
from typing import Any

from scheduler.tools.argument_schema import target_of
from scheduler.tools.call_reader import CallReader, Steps
from scheduler.tools.markers import Markers

_TEXT = frozenset({"string"})
_TYPES: dict[type, str] = {
    type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object",
}  # fmt: skip


class TypedArguments:
    """Writes the arguments of one call of the tool `name` as a JSON object, strings as they arrive."""

    def __init__(self, reader: CallReader, name: str) -> None:
        self._reader = reader
        self._schema = reader.schemas.get(name, {})
        self._before = "{"

    def read(self, key: str, ends: Markers, *, strips_newlines: bool = False) -> Steps[str]:
        """Read one value; return the marker that ends it. `strips_newlines`: one at its start and one at its end."""
        reader = self._reader
        reader.arguments(f"{self._before}{json.dumps(key, ensure_ascii=False)}: ")
        self._before = ", "
        types = types_of_property(self._schema, key)
        if types == _TEXT:
            pieces = _TextPieces(reader, strips_newlines=strips_newlines)
            marker = yield from reader.until(ends, pieces.add)
            if marker:
                reader.arguments('"')
            return marker
        text, marker = yield from reader.taken_until(ends)
        if marker:
            text = text.removeprefix("\n").removesuffix("\n") if strips_newlines else text
            reader.arguments(typed_json(text, types))
        return marker

    def end(self) -> None:
        """Close the object."""
        if self._before != "{":
            self._reader.arguments("}")


class _TextPieces:
    """Passes a text on as the inside of a JSON string; a newline at its end may be the format's, so it is held back."""

    def __init__(self, reader: CallReader, *, strips_newlines: bool) -> None:
        reader.arguments('"')
        self._reader = reader
        self._strips = strips_newlines
        self._is_first = True
        self._held = ""

    def add(self, text: str) -> None:
        if self._strips:
            text = self._held + (text.removeprefix("\n") if self._is_first else text)
            self._is_first = False
            self._held = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        self._reader.arguments(json.dumps(text, ensure_ascii=False)[1:-1])


def types_of_property(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """Return the types that an object's schema allows for a property: string if it names none, as in vLLM."""
    properties = schema.get("properties")
    one = properties.get(key) if isinstance(properties, dict) else None
    types = set[str]()
    waiting, seen = [one], set[int]()
    for part in waiting:  # the list grows meanwhile; references may be circular
        if id(part) in seen:
            continue
        seen.add(id(part))
        kinds, more = _named_types(part, schema)
        types |= kinds if kinds or more else _TEXT
        waiting += more
    return frozenset(types)


def _named_types(one: Any, schema: Mapping[str, Any]) -> tuple[set[str], list[Any]]:
    """Return the types that a schema within `schema` names, and the schemas that it combines."""
    if not isinstance(one, dict):
        return set(), []
    named, values, reference = one.get("type"), one.get("enum"), one.get("$ref")
    kinds = {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
    kinds |= {_TYPES[type(value)] for value in (values if isinstance(values, list) else []) if type(value) in _TYPES}
    lists = [one.get(keyword) for keyword in ("anyOf", "oneOf", "allOf")]
    more = [part for parts in lists if isinstance(parts, list) for part in parts]
    if isinstance(reference, str):
        more.append(target_of(schema, "", reference)[1])
    return kinds, more


def typed_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value written as plain text, by the first type that it fits, otherwise as a string."""
    if "null" in types and text.lower() == "null":
        return "null"
    number = _number(text, types)
    if number is not None:
        return number
    if "boolean" in types and text.strip().lower() in ("true", "false", "1", "0"):
        return "true" if text.strip().lower() in ("true", "1") else "false"
    if (types & {"object", "array"} or "string" not in types) and _is_json(text):
        return text.strip()
    return json.dumps(text, ensure_ascii=False)


def _number(text: str, types: frozenset[str]) -> str | None:
    if "integer" in types:
        try:
            return str(int(text))
        except ValueError:
            pass
    if "number" in types:
        try:
            number = float(text)
        except ValueError:
            return None
        if math.isfinite(number):
            return str(int(number)) if number.is_integer() else repr(number)
    return None


def _is_json(text: str) -> bool:
    import orjson  # late: the flags import this module to list the formats, before heavy imports

    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True
