"""A schema makes the same StructuredOutput in each form that is accepted."""

import json
from typing import Any

import pytest
from pydantic import BaseModel

from wire.errors import InvalidGrammar
from wire.structured_output import choice_output, json_output
from wire.types import StructuredOutput


class _City(BaseModel):
    """A pydantic class as callers write it."""

    name: str
    inhabitants: int


def test_a_pydantic_class_an_instance_and_its_schema_are_equal() -> None:
    schema = _City.model_json_schema()

    from_class = json_output(_City, whitespace_pattern="", backend="outlines")

    assert json.loads(from_class.value) == schema
    assert (from_class.kind, from_class.whitespace_pattern, from_class.backend) == ("json", "", "outlines")
    assert json_output(_City).value == json_output(_City(name="é", inhabitants=1)).value == json_output(schema).value


def test_a_schema_in_text_stays_unchanged() -> None:
    assert json_output('{"type": "integer"}') == StructuredOutput("json", '{"type": "integer"}')


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ([], "json is a list, but must be a JSON schema as text, a dict or a pydantic class"),
        (int, "json is a type"),
        (None, "json is a NoneType"),
        ({"a": object()}, "json cannot be written as JSON: Object of type object"),
        ({"a": float("nan")}, "json cannot be written as JSON"),
    ],
)
def test_other_types_are_refused_with_a_reason(schema: Any, words: str) -> None:
    with pytest.raises(InvalidGrammar, match=words):
        json_output(schema)


def test_choices_are_a_list_of_texts() -> None:
    assert choice_output(("né", 'q"')) == StructuredOutput("choice", '["né", "q\\""]')
    for wrong in ("abc", {"a": 1}, 3):
        with pytest.raises(InvalidGrammar, match="must be a list of strings"):
            choice_output(wrong)  # type: ignore[arg-type]
