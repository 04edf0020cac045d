"""Models' texts become content and calls: the same ones however a text is cut, and nothing raises."""

import json
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest

from scheduler.tools.call_reader import StepParser
from scheduler.tools.deltas import ToolCallParser, joined
from scheduler.tools.forced import NamedCall, required_calls
from scheduler.tools.parsers.registry import CALL_FORMATS

Made = tuple[str, list[tuple[str, str]]]
"""The content, and the name and arguments of each call."""


def parsed(make: Callable[[], ToolCallParser], pieces: Iterable[str]) -> Made:
    """Return all that a parser returns for a text in pieces."""
    parser, content, deltas = make(), "", []
    for text in pieces:
        new = parser.push(text)
        content += new.content
        deltas += new.calls
    last = parser.flush()
    calls = joined([*deltas, *last.calls])
    assert all(one.name for one in calls), "the first delta of a call has its name"
    assert [one.index for one in calls] == list(range(len(calls)))
    return content + last.content, [(one.name or "", one.arguments) for one in calls]


def check_every_cut(make: Callable[[], ToolCallParser], text: str, expected: Made) -> None:
    """Parse `text` whole, cut once at each place, character by character, and cut at random."""
    assert parsed(make, [text]) == expected
    assert parsed(make, text) == expected
    for at in range(len(text)):
        assert parsed(make, [text[:at], text[at:]]) == expected, f"cut at {at}: {text[:at]!r}"
    for seed in range(20):
        chance = random.Random(seed)
        places = sorted(chance.randrange(len(text) + 1) for _ in range(8))
        pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
        assert parsed(make, pieces) == expected, f"cut at {places}"


NESTED = r'{"a": {"b": ["]}", "\"}\\"], "c": {}}, "d": "}, {\"name\": \"x\""}'
UNICODE = '{"city": "東京 \\u00e9 😀", "n": -1.5e3}'


def call(name: str, arguments: str, space: str = " ") -> str:
    """Return a forced call."""
    return f'{{"name":{space}"{name}",{space}"parameters":{space}{arguments}}}'


PLAIN, TIGHT = call("f", "{}"), call("f", "{}", "")
WIDE = " [\n" + call("f", NESTED, "\n ") + " ,\t" + call("g-1", UNICODE) + "\n]\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"[{PLAIN}]", ("", [("f", "{}")])),
        (f"[{TIGHT},{TIGHT}]", ("", [("f", "{}"), ("f", "{}")])),
        (WIDE, ("", [("f", NESTED), ("g-1", UNICODE)])),
        (f"[{PLAIN}, " + call("g", '{"a": [1, ')[:-1], ("", [("f", "{}"), ("g", '{"a": [1, ')])),
        ("[" + call("f", '{"a": "b\\')[:-1], ("", [("f", '{"a": "b\\')])),
        ("[" + call("f", "")[:-1], ("[" + call("f", "")[:-1], [])),
        ('[{"name": "f"', ('[{"name": "f"', [])),
        (f'[{PLAIN}, {{"name": "f"', ("", [("f", "{}")])),
        ('[{"error": "no"}]', ('[{"error": "no"}]', [])),
        ("[", ("[", [])),
        ("", ("", [])),
        ("I cannot do that.", ("I cannot do that.", [])),
        ('{"name": "", "parameters": {}} x', ('{"name": "", "parameters": {}} x', [])),
        (f"[{PLAIN}] and more", ("", [("f", "{}")])),
        ("{" * 3000, ("{" * 3000, [])),
    ],
)  # fmt: skip
def test_required_calls_are_the_same_however_cut(text: str, expected: Made) -> None:
    if len(text) < 1000:
        check_every_cut(required_calls, text, expected)
    assert parsed(required_calls, text) == parsed(required_calls, [text]) == expected


@pytest.mark.parametrize("text", [NESTED, UNICODE, "{}", '{"a', "{"])
def test_a_named_call_has_the_text_as_its_arguments(text: str) -> None:
    check_every_cut(lambda: NamedCall("f"), text, ("", [("f", text)]))


def test_without_text_there_is_no_named_call() -> None:
    assert parsed(lambda: NamedCall("f"), [""]) == ("", [])


HERMES = partial(StepParser, CALL_FORMATS["hermes"].steps)
LONG = '{"id": 123456789012345678901234, "x": 1e2, "s": "\\u00e9}"}'
DEEP = "[" * 990 + "]" * 990
F, G = (f'<tool_call>{{"name": "{name}", "arguments": {{}}}}' for name in "fg")
END = "</tool_call>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f'<tool_call>{{"arguments": {LONG} , "name": "f"}}</tool_call>', ("", [("f", LONG)])),
        (f'<tool_call>{{"arguments": 1, "name": "f", "arguments":{LONG}}}</tool_call>', ("", [("f", LONG)])),
        (f'<tool_call>{{"arguments": {DEEP}, "name": "f"}}</tool_call>', ("", [("f", DEEP)])),
        (F[:-2] + '"a": {"b": 1}' + f"{END}\n{G}{END}", ("", [("f", '{"a": {"b": 1}'), ("g", "{}")])),
        (f"{F}\n{G}{END}{F}", ("", [("f", "{}"), ("g", "{}"), ("f", "{}")])),
        (F + "<tool_<b></" + G, ("", [("f", "{}"), ("g", "{}")])),
        (f"\n \n<tool_call>no{END}", (f"\n \n<tool_call>no{END}", [])),
        (f"\n<tool_call>no{END}\n {F}", (f"\n<tool_call>no{END}\n ", [("f", "{}")])),
        ("\n <tool_call>", ("\n <tool_call>", [])),
    ],
    ids=["long number", "twice", "deep", "not closed", "no end", "markers", "blanks", "blanks after", "begun"],
)  # fmt: skip
def test_hermes_reads_calls_and_content_however_cut(text: str, expected: Made) -> None:
    if len(text) < 1000:
        check_every_cut(HERMES, text, expected)
    assert parsed(HERMES, text) == parsed(HERMES, [text]) == expected


def texts_of_signs(count: int) -> list[Any]:
    """Return random texts of the signs that parsers look at."""
    signs = [
        "<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', '{"name": "f", "parameters": ', '{"a": 1}',
        "{", "}", "[", "]", '"', "\\", ",", " ", "x", "é", "</",
    ]  # fmt: skip
    chance = random.Random(7)
    return ["".join(chance.choice(signs) for _ in range(chance.randrange(30))) for _ in range(count)]


@pytest.mark.covers("B.tools.18")
def test_any_forced_text_is_parsed_the_same_however_cut() -> None:
    for text in texts_of_signs(150):
        check_every_cut(required_calls, text, parsed(required_calls, [text]))


def test_arguments_are_sent_as_they_come() -> None:
    parser = required_calls()
    arguments = json.dumps({"a": "x" * 50})
    text = "[" + call("f", arguments) + "]"
    sent = [delta.arguments for sign in text for delta in parser.push(sign).calls]

    assert "".join(sent) == arguments
    assert max(map(len, sent)) == 1
