"""Find the parts of a JSON schema that xgrammar silently ignores (seen with 0.2.8), so that they are refused. Pure."""

from collections.abc import Iterator
from typing import Any

from wire.errors import InvalidGrammar

_LEFT_OUT = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas",
    "dependencies", "unevaluatedProperties", "unevaluatedItems", "propertyNames",
)  # fmt: skip
_WORDS = frozenset((
    "title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "$schema", "$id",
    "$defs", "definitions", "discriminator",
))  # fmt: skip
_ALONE = {"$ref": (), "anyOf": (), "oneOf": (), "allOf": (), "const": ("type",), "enum": ("type",)}
"""Keywords next to which xgrammar ignores all others except these."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONES = ("items", "additionalProperties")


def check_kept(schema: dict[str, Any]) -> None:
    """Raise InvalidGrammar with the first keyword that xgrammar would ignore."""
    for part in _parts(schema):
        what = next(_left_out(part), None)
        if what is not None:
            raise InvalidGrammar(f"xgrammar ignores {what}; use llguidance, which supports or refuses it")


def _parts(schema: object) -> Iterator[dict[str, Any]]:
    """Yield a schema and all its subschemas; values of const, enum or default are not schemas."""
    left = [schema]
    while left:
        part = left.pop()
        if not isinstance(part, dict):
            continue
        yield part
        left.extend(part[name] for name in _ONES if name in part)
        for name in _LISTS:
            left.extend(part[name] if isinstance(part.get(name), list) else ())
        for name in _MAPS:
            left.extend(part[name].values() if isinstance(part.get(name), dict) else ())


def _left_out(part: dict[str, Any]) -> Iterator[str]:
    yield from (name for name in _LEFT_OUT if name in part)
    reference = part.get("$ref")
    if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
        yield f"$ref {reference[:40]!r}, which is not a path"
    if part.get("uniqueItems") is True:
        yield "uniqueItems"
    for name, allowed in _ALONE.items():
        beside = sorted(part.keys() - _WORDS - {name, *allowed}) if name in part else []
        if beside:
            yield f"{beside[0]} beside {name}"
    if isinstance(part.get("allOf"), list) and len(part["allOf"]) > 1:
        yield "allOf of several schemas"
    if part.get("type") == "number" and "multipleOf" in part:
        yield "multipleOf of type number"
    yield from _left_out_of_text(part)
    properties, required = part.get("properties", {}), part.get("required", ())
    if isinstance(properties, dict) and isinstance(required, list):
        yield from (f"required {name!r}, which is not a property" for name in required if name not in properties)


def _left_out_of_text(part: dict[str, Any]) -> Iterator[str]:
    pattern = part.get("pattern")
    if isinstance(pattern, str):
        yield from (f"{name} beside pattern" for name in ("minLength", "maxLength") if name in part)
        yield from (f"look-around in pattern {pattern[:40]!r}" for sign in ("(?=", "(?!", "(?<") if sign in pattern)
