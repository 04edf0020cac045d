"""Values written as plain text get the types of their tool's schema."""

import json
from typing import Any

import pytest

from scheduler.tools.typed_arguments import typed_json, types_of_property

NAMED: dict[str, Any] = {
    "properties": {
        "a": {"$ref": "#/$defs/point"},
        "b": {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]},
        "c": {"$ref": "#/properties/d"},
        "d": {"oneOf": [{"$ref": "#/properties/c"}, {"type": ["integer", "null"]}]},
        "e": {"enum": [1, "x", None]},
        "f": {"allOf": [{"description": "of any type"}]},
        "g": {"$ref": "#/$defs/missing"},
    },
    "$defs": {"point": {"type": "object"}},
}


@pytest.mark.parametrize(
    ("key", "types"),
    [
        ("a", {"object"}), ("b", {"object", "null"}), ("c", {"integer", "null"}), ("d", {"integer", "null"}),
        ("e", {"integer", "string", "null"}), ("f", {"string"}), ("g", {"string"}), ("unknown", {"string"}),
    ],
)  # fmt: skip
def test_types_follow_references_and_choices(key: str, types: set[str]) -> None:
    assert types_of_property(NAMED, key) == types


@pytest.mark.parametrize("schema", [{}, {"properties": None}, {"properties": {"a": True}}, {"properties": {"a": {}}}])
def test_without_a_type_values_are_text(schema: dict[str, Any]) -> None:
    assert types_of_property(schema, "a") == {"string"}


def test_many_references_in_a_circle_are_followed_once() -> None:
    circle = [{"$ref": "#/properties/a"}] * 1000
    schema = {"properties": {"a": {"anyOf": circle, "oneOf": circle}}}

    assert types_of_property(schema, "a") == set()


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", "integer", 5), (" 7 ", "integer", 7), ("five", "integer", "five"), ("5.5", "integer", 5.5),
        ("5.0", "number", 5), ("-1e3", "number", -1000), ("nan", "number", "nan"), ("1e999", "number", "1e999"),
        ("True", "boolean", True), ("0", "boolean", False), ("yes", "boolean", "yes"),
        ("Null", "null string", None), ("nil", "null string", "nil"), ("5", "integer string", 5),
        ('{"a": [1]}', "object", {"a": [1]}), ("[1, oops", "array", "[1, oops"), ("[" * 5000, "array", "[" * 5000),
        ("{}", "object string", {}), ("x", "object string", "x"), ("{}", "string", "{}"),
        ("9" * 5000, "integer", "9" * 5000), ("NaN", "object", "NaN"),
    ],
    ids=str,
)  # fmt: skip
def test_a_value_has_the_first_type_that_it_fits(text: str, types: str, value: Any) -> None:
    assert json.loads(typed_json(text, frozenset(types.split()))) == value
