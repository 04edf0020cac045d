"""A random model's outputs follow their grammar: 50 texts of each kind, checked by an independent parser."""

import ast
import json
import re
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel, ConfigDict, Field
from tokenizers import Tokenizer

from scheduler.tools.choice import ToolChoice, read_choice
from scheduler.tools.definitions import read_tools
from scheduler.tools.deltas import joined
from scheduler.tools.forced import forced_schema, required_calls
from tests.engine.grammar_tools import accepts, compiled, random_texts, tokenizer_of
from tests.engine.tiny_models import make_tiny_model
from wire.structured_output import json_output
from wire.types import StructuredOutput

_SCHEMA: dict[str, Any] = {
    "$defs": {"size": {"type": "string", "enum": ["small", "large é"]}},
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "size": {"$ref": "#/$defs/size"},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "size", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny random checkpoint."""
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"))


def _texts(folder: Path, kind: str, value: str, **more: Any) -> list[str]:
    return random_texts(folder, compiled(tokenizer_of(folder), StructuredOutput(kind, value, **more)))


def test_json_follows_its_schema(folder: Path) -> None:
    texts = _texts(folder, "json", json.dumps(_SCHEMA))

    for text in texts:
        jsonschema.validate(json.loads(text), _SCHEMA)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Circle(_Strict):
    kind: Literal["circle"]
    radius: Annotated[int, Field(gt=0, lt=10)]


class _Label(_Strict):
    kind: Literal["label"]
    text: Annotated[str, Field(pattern="^[A-Z]{1,3}$")]
    at: tuple[bool, bool]


class _Picture(_Strict):
    parts: Annotated[list[Annotated[_Circle | _Label, Field(discriminator="kind")]], Field(min_length=1, max_length=3)]
    made: date | None = None


_LINKED: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "definitions": {"node": {
        "type": "object",
        "properties": {"on": {"type": "boolean"}, "next": {"$ref": "#/definitions/node"}},
        "required": ["on"],
        "additionalProperties": False,
    }},
    "properties": {"first": {"$ref": "#/definitions/node"}},
    "required": ["first"],
}  # fmt: skip
_PARAMETERS = {"size": _SCHEMA, "list": _LINKED, "now": None, "empty": {}}


def _choice(tool_choice: Any, parallel: bool = True) -> ToolChoice:
    tools = [{"function": {"name": name, "parameters": schema}} for name, schema in _PARAMETERS.items()]
    return read_choice(read_tools(tools, None), tool_choice, None, parallel=parallel, legacy=False)


def _check_arguments(name: str, arguments: str) -> None:
    """Raise unless the arguments fit the schema as the client wrote it; without one there are none."""
    jsonschema.validate(json.loads(arguments), _PARAMETERS[name] or {"maxProperties": 0, "type": "object"})


@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_fit_the_schemas_of_their_tools(folder: Path, parallel: bool) -> None:
    option = json_output(forced_schema(_choice("required", parallel)), whitespace_pattern="[ ]?")
    names, counts = set(), set()
    for text in random_texts(folder, compiled(tokenizer_of(folder), option)):
        parsed = required_calls().push(text)
        calls = joined(parsed.calls)
        assert parsed.content == ""
        counts.add(len(calls))
        for call in calls:
            names.add(call.name)
            _check_arguments(call.name or "", call.arguments)

    assert names == set(_PARAMETERS)
    assert (max(counts) > 1) is parallel
    assert min(counts) == 1


@pytest.mark.parametrize("name", _PARAMETERS)
def test_a_named_call_fits_the_schema_of_its_tool(folder: Path, name: str) -> None:
    option = json_output(forced_schema(_choice({"function": {"name": name}})), whitespace_pattern="")

    for text in random_texts(folder, compiled(tokenizer_of(folder), option), count=10):
        _check_arguments(name, text)


def test_json_of_a_pydantic_class_is_read_by_it(folder: Path) -> None:
    option = json_output(_Picture, whitespace_pattern="")

    for text in random_texts(folder, compiled(tokenizer_of(folder), option)):
        _Picture.model_validate_json(text)


def test_json_without_whitespace_has_none_outside_strings(folder: Path) -> None:
    texts = _texts(folder, "json", json.dumps(_SCHEMA), whitespace_pattern="")

    for text in texts:
        json.loads(text)
        assert not re.search(r"\s", re.sub(r'"(?:[^"\\]|\\.)*"', "", text))


def test_json_with_one_blank_has_at_most_one(folder: Path) -> None:
    texts = _texts(folder, "json", json.dumps(_SCHEMA), whitespace_pattern="[ ]?")

    outside = [re.sub(r'"(?:[^"\\]|\\.)*"', '""', text) for text in texts]
    assert not any(re.search(r"\s\s|[^\S ]", text) for text in outside)
    assert any(" " in text for text in outside)


@pytest.mark.parametrize(
    "pattern", [r"[a-z]{2,5}-\d{1,3}(\.[A-F]{1,4})?", r"(yes|no|möglich)( sehr){0,3}!", r"\w{1,4}\s\S"]
)
def test_a_regex_matches_in_full(folder: Path, pattern: str) -> None:
    texts = _texts(folder, "regex", pattern)

    assert all(re.fullmatch(pattern, text) for text in texts)


def test_a_choice_is_one_of_them_and_each_prefix_can_be(folder: Path) -> None:
    choices = ["a", "ab", "abc(", 'q"\\\n.*', "日本", "😀", "\t\b\f\x1f\x7f\x85"]

    grammar = compiled(tokenizer_of(folder), StructuredOutput("choice", json.dumps(choices)))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    assert set(random_texts(folder, grammar)) <= set(choices)
    assert [choice for choice in choices if not accepts(grammar, tokenizer, choice)] == []
    assert not accepts(grammar, tokenizer, "aba")


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= expr\nexpr ::= term (" + " term){0,2}\nterm ::= digit | "(" expr ")"\ndigit ::= [0-9]{1,3}',
        'start: expr\nexpr: term (" + " term)~0..2\nterm: NUMBER | "(" expr ")"\nNUMBER: /[0-9]{1,3}/',
    ],
    ids=["EBNF", "Lark"],
)
def test_a_sum_of_a_grammar_can_be_added_up(folder: Path, grammar: str) -> None:
    texts = _texts(folder, "grammar", grammar)

    for text in texts:
        tree = ast.parse(re.sub(r"\b0+(?=\d)", "", text), mode="eval")
        assert all(isinstance(node, _SUM) for node in ast.walk(tree))


_SUM = (ast.Expression, ast.BinOp, ast.Add, ast.Constant, ast.Load)


def test_a_toy_sql_follows_its_grammar(folder: Path) -> None:
    grammar = (
        'root ::= "SELECT " columns " FROM " name (" WHERE " name " = " value)?\n'
        'columns ::= name (", " name){0,2}\n'
        "name ::= [a-z] [a-z0-9]{0,4}  # short\n"
        'value ::= [0-9]{1,3}\n  | "\'" [^\'\\n]{0,3} "\'"\n'
    )

    texts = _texts(folder, "grammar", grammar)

    name = "[a-z][a-z0-9]{0,4}"
    form = rf"SELECT {name}(, {name}){{0,2}} FROM {name}( WHERE {name} = (\d{{1,3}}|'[^'\n]{{0,3}}'))?"
    assert all(re.fullmatch(form, text) for text in texts)


def test_a_json_object_parses(folder: Path) -> None:
    grammar = compiled(tokenizer_of(folder), StructuredOutput("json_object", ""))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    assert accepts(grammar, tokenizer, '{"a": [1, {"b": null}], "é": "\\u00e9 \\" x"}')
    assert not accepts(grammar, tokenizer, "[1]")
    assert not accepts(grammar, tokenizer, '{"a": 01}')
