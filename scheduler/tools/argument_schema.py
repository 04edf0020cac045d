"""Walk a tool's JSON schema, and refuse what no arguments can match, with the path of the field. Pure."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

from wire.errors import InvalidRequest

_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
_SCHEMAS = frozenset((
    "additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "else", "if", "items", "not", "oneOf",
    "prefixItems", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
))  # fmt: skip
"""Keywords whose values are schemas, or lists of them."""
_NAMED_SCHEMAS = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))
"""Keywords whose values map names to schemas."""
_LISTS: Mapping[str, type] = MappingProxyType(
    {"allOf": object, "anyOf": object, "enum": object, "oneOf": object, "prefixItems": object, "required": str}
)
"""Keywords whose values are lists, and the type of the items."""


def check_schema(schema: Any, path: str) -> None:
    """Refuse a schema that no arguments can match: arguments are an object, and remote references are not fetched."""
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{path} is not a JSON schema: it must be an object", path)
    if schema.get("type", "object") != "object":
        raise InvalidRequest(f'{path}.type must be "object": the arguments of a call are an object', f"{path}.type")
    followed = set[int]()
    for where, part in subschemas(schema, path):
        _check_keywords(part, where)
        if (kind := part.get("type")) is not None:
            kinds = kind if isinstance(kind, list) else [kind]
            if not kinds or not all(isinstance(one, str) and one in _TYPES for one in kinds):
                raise InvalidRequest(f"{where}.type is {str(kind)[:40]!r}, not a type of JSON schema", f"{where}.type")
        reference = part.get("$ref", "#")
        if not (isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))):
            raise InvalidRequest(
                f"{where}.$ref is {str(reference)[:100]!r}; it must be within the schema, such as #/$defs/name",
                f"{where}.$ref",
            )
        _follow(schema, part, f"{where}.$ref", followed)


def subschemas(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each schema within `schema`, itself included, and each that one of them refers to, with its path."""
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


def _follow(schema: dict[str, Any], part: Any, path: str, followed: set[int]) -> None:
    """Refuse a reference that leads nowhere, or back to itself; `followed` has the parts already followed."""
    chain: dict[int, Any] = {}
    while isinstance(part, dict) and isinstance(reference := part.get("$ref"), str) and id(part) not in followed:
        if id(part) in chain:
            raise InvalidRequest(f"{path} leads back to itself", path)
        chain[id(part)] = part
        part = schema if reference == "#" else target_of(schema, "", reference)[1]
        if len(chain) == 1 and not isinstance(part, (dict, bool)):
            raise InvalidRequest(f"{path} is {reference[:100]!r}, which leads to no schema", path)
    followed.update(chain)


def _check_keywords(schema: Mapping[str, Any], path: str) -> None:
    """Refuse keywords whose values are of the wrong type; null is as if the keyword were left out."""
    for key, value in schema.items():
        where, parts = f"{path}.{key}", [("", value)]
        if value is None:
            continue
        if key in _LISTS and not _is_list_of(value, _LISTS[key]):
            raise InvalidRequest(f"{where} must be a list{' of strings' if key == 'required' else ''}", where)
        if key == "pattern" and not isinstance(value, str):
            raise InvalidRequest(f"{where} is not a string", where)
        if key in _NAMED_SCHEMAS:
            if not isinstance(value, dict):
                raise InvalidRequest(f"{where} must be an object of schemas by their names", where)
            parts = [(f".{name}", one) for name, one in value.items()]
        elif key not in _SCHEMAS:
            continue
        elif isinstance(value, list):
            parts = [(f".{at}", one) for at, one in enumerate(value)]
        for name, one in parts:
            if not isinstance(one, (dict, bool)):
                raise InvalidRequest(
                    f"{where}{name} is not a JSON schema: it must be an object or a boolean", f"{where}{name}"
                )


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(one, kind) for one in value)
