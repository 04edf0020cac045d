"""The constraints that a request may put on its output: refused before any compilation, or brought into one form."""

import json
import sys

import pytest

from engine.grammar.limits import GrammarLimits
from engine.grammar.source import GrammarKind, GrammarSource, nesting, read_source
from wire.errors import InvalidGrammar, appearance
from wire.structured_output import BACKENDS
from wire.types import StructuredOutput

_LIMITS = GrammarLimits()


def _optional(count: int, *required: str) -> str:
    """Return the schema of an object with this many properties, of which few are required."""
    return json.dumps({"properties": {f"p{i}": {"type": "integer"} for i in range(count)}, "required": required})


def _object(letter: str, count: int = 900) -> dict[str, object]:
    """Return the schema of an object with this many optional properties."""
    return {"properties": {f"{letter}{i}": {} for i in range(count)}}


def _spread(parts: int, count: int, keyword: str = "allOf") -> str:
    """Return the schema of an object whose optional properties are spread over `parts` schemas, `count` in each."""
    each: list[object] = [{"properties": {f"p{i}_{j}": {} for j in range(count)}} for i in range(parts)]
    return json.dumps({keyword: each}, separators=(",", ":"))


_THROUGH_REFERENCES = json.dumps(
    {
        "$defs": {"a/b": {"properties": {f"a{i}": {} for i in range(600)}, "allOf": [{"$ref": "#"}]}},
        "properties": {f"p{i}": {} for i in range(600)},
        "$ref": "#/$defs/a~1b",
    }
)
_MANY_LEAD_TO_MANY = json.dumps(
    {"$defs": {"a": {"allOf": [{}] * 5000}}, "anyOf": [{"allOf": [{"$ref": "#/$defs/a"}]}] * 1000},
    separators=(",", ":"),
)
_NULL: dict[str, object] = {"type": "null"}
_A, _B, _C = _object("a"), _object("b"), _object("c")
_TWO_OBJECTS_IN_ONE: list[dict[str, object]] = [
    _A | {"anyOf": [_NULL, _B, _object("c", 3)]},
    _A | {"oneOf": [_B]},
    _A | {"anyOf": [_NULL, {"$ref": "#/$defs/b"}], "$defs": {"b": {"oneOf": [_B, _NULL]}}},
    _A | {"anyOf": [_A, _object("b", 901) | {"required": [f"a{i}" for i in range(9)]}, _C]},
    {"anyOf": [_A, _NULL], "oneOf": [_NULL, _B]},
    {"allOf": [{"anyOf": [_NULL, _A]}, {"anyOf": [_NULL, _B]}]},
    {"anyOf": [_A], "$ref": "#/$defs/b", "$defs": {"b": _B}},
    _A | {"$ref": "#/%24defs/%62", "$defs": {"b": _B}},
    _A | {"$ref": "#b%20c", "$defs": {"b": _B | {"$anchor": "b c"}}},
]
_OPTIONS_LEAD_TO_OPTIONS = {
    "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(60)},
    "properties": {},
    "$ref": "#/$defs/d0",
}


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("json", "", "json is empty"),
        ("json", " ", "json is empty"),
        ("json", "{}", "allows anything"),
        ("json", "3", "json is 3, but must be an object"),
        ("json", "[]", r"json is \[\], but must be an object"),
        ("json", "{", "not JSON"),
        ("json", '{"maximum": NaN}', "not JSON"),
        ("json", '{"maximum": 1e999}', "not JSON"),
        ("json", r'{"const": "\ud800"}', "not JSON"),
        ("json", '{"$ref": "http://x"}', "'http://x', but must be within the schema"),
        ("json", '{"items": [{"$ref": "file:///etc/passwd"}]}', "must be within the schema"),
        ("json", "[" * 10_000 + "]" * 10_000, "nested 10000 deep, but the limit is 64"),
        ("json", '{"a":' * 65 + "1" + "}" * 65, "nested 65 deep, but the limit is 64"),
        ("json", _optional(2000), "2000 optional properties, but the limit is 1000"),
        ("json", '{"anyOf": [' + _optional(1001) + "]}", "1001 optional properties, but the limit is 1000"),
        ("json", _spread(3, 900), "2700 optional properties, but the limit is 1000"),
        ("json", _THROUGH_REFERENCES, "1200 optional properties, but the limit is 1000"),
        *(("json", json.dumps(schema), "1800 optional .*, but the limit is 1000") for schema in _TWO_OBJECTS_IN_ONE),
        ("json", _MANY_LEAD_TO_MANY, r"allOf, anyOf, oneOf and \$ref .* expand to more parts than the limit of 200000"),
        ("json", json.dumps(_OPTIONS_LEAD_TO_OPTIONS), "expand to more parts than the limit of 200000"),
        ("regex", "a|" * 500_000, "1000000 bytes, but the limit is 65536"),
        ("regex", "", "regex is empty"),
        ("regex", "\ud800", "regex is not valid text"),
        ("choice", "[]", "0 texts, but must have 1 to 4096"),
        ("choice", '["a", 1]', "a list of strings"),
        ("choice", '"a"', "a list of strings"),
        ("choice", json.dumps([str(i) for i in range(4097)]), "4097 texts"),
        ("grammar", "", "grammar is empty"),
        ("structural_tag", "[]", "must be an object"),
        ("nope", "x", "'nope' is not a kind of structured output; the kinds are json"),
    ],
)
def test_an_error_is_reported_with_value_and_limit(kind: str, value: str, words: str) -> None:
    with pytest.raises(InvalidGrammar, match=words) as caught:
        read_source(StructuredOutput(kind, value), _LIMITS)

    assert appearance(caught.value).http_status == 400


def test_required_properties_are_not_optional() -> None:
    assert read_source(StructuredOutput("json", _optional(1001, "p3")), _LIMITS).kind is GrammarKind.JSON


@pytest.mark.parametrize(
    "schema",
    [
        _spread(3, 900, "anyOf"),
        '{"properties": {"allOf": {"$ref": "#"}, "properties": {"const": "$ref"}}}',
        '{"$ref": "#/nowhere", "allOf": 3}',
        '{"$ref": "#/allOf/7", "allOf": [1]}',
        '{"$ref": "#/allOf/' + "1" * 5000 + '", "allOf": [1]}',
        json.dumps({"properties": {f"p{i}": {"$ref": "#"} for i in range(999)}}),
        json.dumps(_object("a", 600) | {"anyOf": [_object(letter, 400) for letter in "bcd"], "oneOf": []}),
        json.dumps(_A | {"anyOf": [_B | {"required": [f"b{i}" for i in range(900)]}, {"$ref": "#"}]}),
        json.dumps(_A | {"items": _B | {"$ref": "#nowhere"}}),
        json.dumps(_A | {"items": _B | {"$ref": "#c"}, "$defs": {"c": _NULL | {"$anchor": "c"}}}),
    ],
)
def test_only_properties_of_one_object_are_counted_together(schema: str) -> None:
    assert read_source(StructuredOutput("json", schema), _LIMITS).kind is GrammarKind.JSON


def test_a_reference_is_split_only_once() -> None:
    """A pointer of 32,000 names that 1,400 parts lead to would otherwise block the instance's event loop."""
    each: list[object] = [{"allOf": 0, "$ref": "#"} for _ in range(1400)]
    schema = json.dumps({"$ref": "#" + "/" * 32_000, "x": each}, separators=(",", ":"))
    split: list[str] = []

    def note(frame: object, event: str, function: object) -> None:
        if event == "c_call" and getattr(function, "__name__", "") == "split":
            split.append(event)

    sys.setprofile(note)
    try:
        read_source(StructuredOutput("json", schema), _LIMITS)
    finally:
        sys.setprofile(None)

    assert 1 <= len(split) <= 2


def test_another_backend_is_unknown() -> None:
    with pytest.raises(InvalidGrammar, match="Unknown guided decoding backend: 'jsonformer'"):
        read_source(StructuredOutput("regex", "a", backend="jsonformer"), _LIMITS)


@pytest.mark.parametrize("name", BACKENDS)
def test_other_names_are_served_by_llguidance(name: str) -> None:
    assert read_source(StructuredOutput("regex", "a", backend=name), _LIMITS) == GrammarSource(GrammarKind.REGEX, "a")


def test_nesting_counts_no_brackets_in_strings() -> None:
    assert nesting(r'{"a": "[[[\"[", "b": [{}]}', "[{", "]}") == 3


def test_any_json_object_is_a_schema() -> None:
    assert read_source(StructuredOutput("json_object", ""), _LIMITS) == GrammarSource(
        GrammarKind.JSON, '{"type":"object"}'
    )


def test_equal_sources_have_equal_keys_and_others_do_not() -> None:
    spaced = read_source(StructuredOutput("json", '{"type":  "object"}'), _LIMITS)
    others = [
        GrammarSource(GrammarKind.JSON, '{"type":"object"}', whitespace=""),
        GrammarSource(GrammarKind.REGEX, '{"type":"object"}'),
    ]

    assert spaced.key == GrammarSource(GrammarKind.JSON, '{"type":"object"}').key
    assert len({spaced.key, *(other.key for other in others)}) == 3
