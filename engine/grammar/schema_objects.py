"""Count the optional properties of each object that a JSON schema describes. Pure."""

from collections.abc import Iterator
from typing import Any

from engine.grammar.limits import GrammarLimits
from wire.errors import InvalidGrammar


def check_properties(schema: object, limits: GrammarLimits) -> None:
    """Raise InvalidGrammar where an object, with its allOf and $ref, has too many optional properties."""
    left = limits.merged_parts
    for part in parts_of(schema):
        if not part.keys() & {"properties", "allOf"}:
            continue  # the target of a $ref alone is a part itself
        optional, seen = _optional_properties(part, schema, left)
        left -= seen
        if left < 0:
            raise InvalidGrammar(
                f"allOf and $ref of the schema lead to more than {limits.merged_parts} parts, the limit"
            )
        if optional > limits.optional_properties:
            raise InvalidGrammar(
                f"an object of the schema has {optional} optional properties, the limit is {limits.optional_properties}"
            )


def parts_of(value: object) -> Iterator[dict[str, Any]]:
    """Return each JSON object within a value."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            yield part
            left.extend(part.values())
        elif isinstance(part, list):
            left.extend(part)


def _optional_properties(part: dict[str, Any], schema: object, most: int) -> tuple[int, int]:
    """Return how many optional properties the object has, and how many parts, properties and names were visited.

    Stops after `most` visits.
    """
    names, needed, seen = set[str](), set[str](), set[int]()
    left: list[Any] = [part]
    size = 0
    while left and size <= most:
        one = left.pop()
        size += 1
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
        properties, required, merged = one.get("properties"), one.get("required"), one.get("allOf")
        if isinstance(properties, dict):
            names |= properties.keys()
            size += len(properties)
        if isinstance(required, list):
            needed.update(name for name in required if isinstance(name, str))
            size += len(required)
        if isinstance(merged, list):
            left.extend(merged)
        left.append(_target(one.get("$ref"), schema))
    return len(names - needed), size


def _target(reference: object, schema: object) -> object:
    """Return the part of the schema at a JSON pointer, None where there is no such part."""
    if not isinstance(reference, str):
        return None
    found = schema
    for key in reference.removeprefix("#").split("/")[1:]:
        name = key.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and len(name) < 9 and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found
