"""A JSON schema of which xgrammar would leave something out is refused by the name of that."""

from typing import Any

import pytest

from engine.grammar.xgrammar_schema import check_kept
from wire.errors import InvalidGrammar

_INT = {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "not": {"const": 2}}, "ignores not;"),
        ({"type": "array", "items": _INT, "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "items": {"type": "array", "contains": _INT}}, "contains"),
        ({"type": "object", "properties": {"a": {"anyOf": [_INT, {"if": {}}]}}}, "ignores if"),
        ({"$defs": {"i": _INT}, "$ref": "#/$defs/i", "maximum": 3}, r"maximum beside \$ref"),
        ({"$defs": {"i": {"$anchor": "x", "type": "integer"}}, "$ref": "#x"}, r"\$ref '#x', which is not a path"),
        ({"type": "object", "anyOf": [{"required": ["a"]}]}, "type beside anyOf"),
        ({"const": 1, "minimum": 0}, "minimum beside const"),
        ({"allOf": [_INT, {"minimum": 3}]}, "allOf of several schemas"),
        ({"type": "number", "multipleOf": 0.25}, "multipleOf of type number"),
        ({"type": "string", "pattern": "^a+$", "maxLength": 3}, "maxLength beside pattern"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around in pattern"),
        ({"type": "object", "required": ["x"], "properties": {"y": _INT}}, "required 'x', which is not a property"),
    ],
)
def test_it_is_refused_by_its_name(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidGrammar, match=words):
        check_kept(schema)


def test_properties_and_values_of_such_names_are_none_of_them() -> None:
    check_kept(
        {
            "$defs": {"i": _INT},
            "type": "object",
            "title": "if",
            "properties": {
                "not": {"$ref": "#/$defs/i", "description": "a reference", "default": 3},
                "if": {"enum": [{"not": 1}], "type": "object"},
                "const": {"const": {"contains": 1}},
                "tags": {"type": "array", "items": {"type": "integer", "multipleOf": 5}, "uniqueItems": False},
            },
            "required": ["not", "if"],
            "additionalProperties": False,
        }
    )
