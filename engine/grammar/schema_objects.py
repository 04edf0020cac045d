"""Count the optional properties of each object that a JSON schema describes. Pure."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from engine.grammar.limits import GrammarLimits
from wire.errors import InvalidGrammar

_PART, _OPTION = 2, 8  # cost of a visit; a property or a name costs 1


def check_properties(schema: object, limits: GrammarLimits) -> None:
    """Raise InvalidGrammar if an object has too many optional properties.

    Those of its allOf and $ref count, and those of the largest option of its anyOf and oneOf.
    """
    objects = _Objects(schema, limits)
    for part in parts_of(schema):
        if not part.keys() & {"properties", "allOf"} and len(part.keys() & {"$ref", "anyOf", "oneOf"}) < 2:
            continue  # the target of a bare $ref is a part itself, and so is each option
        names, needed = objects.merged(part)
        optional = len(names - needed)
        if optional > limits.optional_properties:
            raise InvalidGrammar(
                f"an object of the schema has {optional} optional properties, "
                f"but the limit is {limits.optional_properties}"
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


class _Objects:
    """Merges the parts of a schema that are one object, in a bounded number of visits altogether."""

    def __init__(self, schema: object, limits: GrammarLimits) -> None:
        self._limits, self._visits = limits, 0
        self._merging = set[int]()
        anchors = {part["$anchor"]: part for part in parts_of(schema) if isinstance(part.get("$anchor"), str)}
        references = {part["$ref"] for part in parts_of(schema) if isinstance(part.get("$ref"), str)}
        self._targets = {reference: _target(reference, schema, anchors) for reference in references}

    def merged(self, part: object, depth: int = 0) -> tuple[set[str], set[str]]:
        """Return the names of an object's properties, and those of the required ones.

        They include those of its allOf and $ref, and of the largest option of each of its anyOf and oneOf.

        Raises InvalidGrammar after too many visits of parts, properties and names.
        """
        names, needed, parts = set[str](), set[str](), set[int]()
        choices = []
        left: list[Any] = [part]
        while left:
            one = left.pop()
            self._visit(_PART)
            if not isinstance(one, dict) or id(one) in self._merging:
                continue
            self._merging.add(id(one))
            parts.add(id(one))
            properties, required, reference = one.get("properties"), one.get("required"), one.get("$ref")
            if isinstance(properties, dict):
                self._visit(len(properties))
                names |= properties.keys()
            if isinstance(required, list):
                self._visit(len(required))
                needed.update(name for name in required if isinstance(name, str))
            if isinstance(reference, str):
                left.append(self._targets[reference])
            if isinstance(one.get("allOf"), list):
                left.extend(one["allOf"])
            choices += [one[key] for key in ("anyOf", "oneOf") if isinstance(one.get(key), list)]

        def added(option: tuple[set[str], set[str]]) -> int:
            more, required = option
            self._visit(_OPTION + len(more) + len(required))
            return len(more - required - names - needed) - len((required - needed) & names)

        for options in choices if depth < self._limits.nesting else ():  # llguidance does not merge deeper ones
            more, required = max((self.merged(option, depth + 1) for option in options), key=added, default=((), ()))
            names.update(more)
            needed.update(required)
        self._merging -= parts
        return names, needed

    def _visit(self, count: int) -> None:
        self._visits += count
        if self._visits > self._limits.merged_parts:
            raise InvalidGrammar(
                "allOf, anyOf, oneOf and $ref of the schema expand to more parts than "
                f"the limit of {self._limits.merged_parts}"
            )


def _target(reference: str, schema: object, anchors: dict[str, dict[str, Any]]) -> object:
    """Return the part of the schema that a $ref refers to, None where there is no such part."""
    pointer = unquote(reference.removeprefix("#"))
    if pointer and not pointer.startswith("/"):
        return anchors.get(pointer)
    found = schema
    for key in pointer.split("/")[1:]:
        name = key.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and len(name) < 9 and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found
