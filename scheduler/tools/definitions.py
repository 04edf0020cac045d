"""Read a body's tools, in the form of its API, as chat templates expect them. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from wire.errors import InvalidRequest

MAX_TOOLS = 128
"""As many as OpenAI's API accepts."""
Tool = Mapping[str, Any]
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
_SCHEMAS = frozenset((
    "additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "else", "if", "items", "not", "oneOf",
    "prefixItems", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
))  # fmt: skip
"""Keywords whose values are schemas, or lists of them."""
_NAMED_SCHEMAS = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))
"""Keywords whose values map names to schemas."""


@dataclass(frozen=True, slots=True)
class ToolForm:
    """The form of tools in one API: the body's field, and below a tool the paths of its function and of its schema.

    `kind` is the only type that tools may have, None if they have none. With `needs_schema` each has a schema.
    """

    field: str
    function: str
    schema: str
    kind: str | None
    max_name_chars: int = 64
    needs_schema: bool = False

    def path(self, at: int) -> str:
        """Return the path of the function of tool number `at`."""
        return f"{self.field}.{at}.{self.function}" if self.function else f"{self.field}.{at}"

    def schema_path(self, at: int) -> str:
        """Return the path of its schema."""
        return f"{self.path(at)}.{self.schema}"


TOOLS = ToolForm("tools", "function", "parameters", "function")
FUNCTIONS = ToolForm("functions", "", "parameters", None)
"""The legacy form of TOOLS."""


def read_tools(tools: Any, functions: Any) -> tuple[Tool, ...]:
    """Return the tools of a body, none if it has neither field. Raises InvalidRequest with the path of the field."""
    if tools is not None and functions is not None:
        raise InvalidRequest("functions is the legacy form of tools: use one of them", "functions")
    return tools_in(TOOLS, tools) if functions is None else tools_in(FUNCTIONS, functions)


def tools_in(form: ToolForm, given: Any) -> tuple[Tool, ...]:
    """Return the tools of a field in this form, none for None. Raises InvalidRequest with the path of the field."""
    field = form.field
    if given is None:
        return ()
    if not isinstance(given, list) or not given:
        raise InvalidRequest(f"{field} must be a list of at least one, or be left out", field)
    if len(given) > MAX_TOOLS:
        raise InvalidRequest(f"{field} has {len(given)}; at most {MAX_TOOLS} are allowed", field)
    read = tuple(_tool(one, at, form) for at, one in enumerate(given))
    _check_names(form, [tool["function"]["name"] for tool in read])
    return read


def schemas_by_name(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    """Return the schema of each tool's arguments by the tool's name."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}


def subschemas(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each object that is a schema within `schema`, itself included, or that one refers to, with its path."""
    seen = set[int]()
    waiting: list[tuple[str, Any]] = [(path, schema)]
    for at, one in waiting:
        if id(one) in seen or not isinstance(one, dict):
            continue
        for where, part in _nested_schemas(one, at):
            if id(part) in seen:
                continue
            seen.add(id(part))
            yield where, part
            if isinstance(reference := part.get("$ref"), str) and reference.startswith("#/"):
                waiting.append(target_of(schema, path, reference))


def _nested_schemas(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(schema, list):
        for at, item in enumerate(schema):
            yield from _nested_schemas(item, f"{path}.{at}")
    elif isinstance(schema, dict):
        yield path, schema
        for key, value in schema.items():
            if key in _SCHEMAS:
                yield from _nested_schemas(value, f"{path}.{key}")
            elif key in _NAMED_SCHEMAS and isinstance(value, dict):
                for name, one in value.items():
                    yield from _nested_schemas(one, f"{path}.{key}.{name}")


def target_of(value: Any, path: str, reference: str) -> tuple[str, Any]:
    """Return the path and the value of a JSON pointer (RFC 6901), None if there is none."""
    for part in unquote(reference[2:]).split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        path = f"{path}.{name}"
        if isinstance(value, list):
            value = value[int(name)] if name.isdecimal() and len(name) < 9 and int(name) < len(value) else None
        else:
            value = value.get(name) if isinstance(value, dict) else None
    return path, value


def _tool(value: Any, at: int, form: ToolForm) -> Tool:
    path = f"{form.field}.{at}"
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path} is not an object", path)
    if form.kind is not None and (kind := value.get("type")) not in (None, form.kind):
        raise InvalidRequest(f"{path}.type is {str(kind)[:40]!r}; only {form.kind} is supported", f"{path}.type")
    function = value.get(form.function) if form.function else value
    return {"type": "function", "function": _function(function, form.path(at), form)}


def _function(value: Any, path: str, form: ToolForm) -> dict[str, Any]:
    """Return the fields that templates see, null if not given, as vLLM passes them."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path} is not an object", path)
    name, about, schema, strict = (value.get(key) for key in ("name", "description", form.schema, "strict"))
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > form.max_name_chars:
        shown = repr(name)[:80] if isinstance(name, str) else "missing or not a string"
        raise InvalidRequest(
            f"{path}.name is {shown}; it must have 1 to {form.max_name_chars} of the characters a-z, A-Z, 0-9, _ and -",
            f"{path}.name",
        )
    if about is not None and not isinstance(about, str):
        raise InvalidRequest(f"{path}.description is not a string", f"{path}.description")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{path}.strict is neither true nor false", f"{path}.strict")
    if schema is not None or form.needs_schema:
        _check_schema(schema, f"{path}.{form.schema}")
    fields = {"name": name, "description": about, "parameters": schema}
    return fields if strict is None else fields | {"strict": strict}


def _check_schema(schema: Any, path: str) -> None:
    """Refuse a schema that no arguments can match: arguments are an object, and remote references are not fetched."""
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{path} is not a JSON schema: it must be an object", path)
    if schema.get("type", "object") != "object":
        raise InvalidRequest(f'{path}.type must be "object": arguments are one', f"{path}.type")
    for where, part in subschemas(schema, path):
        if (kind := part.get("type")) is not None:
            kinds = kind if isinstance(kind, list) else [kind]
            if not kinds or not all(isinstance(one, str) and one in _TYPES for one in kinds):
                raise InvalidRequest(f"{where}.type is {str(kind)[:40]!r}, not a type of JSON schema", f"{where}.type")
        reference = part.get("$ref", "#")
        if not (isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))):
            raise InvalidRequest(
                f"{where}.$ref is {str(reference)[:100]!r}; it must be within the schema, as #/$defs/name",
                f"{where}.$ref",
            )


def _check_names(form: ToolForm, names: list[str]) -> None:
    seen = set[str]()
    for at, name in enumerate(names):
        if name in seen:
            raise InvalidRequest(f"{form.field} has two functions named {name!r}", f"{form.path(at)}.name")
        seen.add(name)
