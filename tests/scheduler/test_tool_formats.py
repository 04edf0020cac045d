"""The formats of models' calls, each compared with vLLM's own parser over texts cut everywhere."""

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from scheduler.tools.call_reader import MAX_HEAD_CHARS, StepParser
from scheduler.tools.definitions import schemas_by_name
from scheduler.tools.deltas import ToolCallParser
from scheduler.tools.parsers.registry import CALL_FORMATS
from tests.scheduler.test_tool_parsers import Made, check_every_cut, parsed
from tests.scheduler.tool_calls_by_vllm import FORMATS, TOOLS

FOLDER = Path(__file__).parent / "tool_call_tables"
Row = dict[str, Any]


def rows(name: str, group: str) -> list[Row]:
    """Return what vLLM's parser of a format returns for a group of texts, written by tool_calls_by_vllm.py."""
    table = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return [row for row in table if row["group"] == group]


def maker(name: str) -> Callable[[], ToolCallParser]:
    """Return what makes parsers of a format, for the tools of the table."""
    return partial(StepParser, CALL_FORMATS[FORMATS[name].parser].steps, schemas_by_name(TOOLS))


def read(arguments: str) -> Any:
    """Return arguments as an object, the text of those that are cut or malformed."""
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return arguments.rstrip()


def comparable(made: Any) -> tuple[str, list[tuple[str, Any]]]:
    """Return content and calls with arguments as objects; vLLM's whole answers strip content beside calls."""
    content, calls = made
    return content.strip() if calls else content, [(name, read(arguments)) for name, arguments in calls]


def both(row: Row) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Return vLLM's whole and streamed results."""
    return [comparable(row["whole"]), comparable(row.get("streamed", row["whole"]))]


@pytest.mark.covers("B.tools.9")
@pytest.mark.parametrize("name", FORMATS)
def test_right_texts_are_read_as_in_vllm(name: str) -> None:
    for row in rows(name, "right"):
        ours = parsed(maker(name), [row["text"]])

        assert comparable(ours) in both(row), row["text"]
        check_every_cut(maker(name), row["text"], ours)


@pytest.mark.parametrize("name", FORMATS)
def test_a_cut_answer_is_the_beginning_of_the_whole_one(name: str) -> None:
    for row in rows(name, "right"):
        content, calls = parsed(maker(name), [row["text"]])
        for at in range(len(row["text"])):
            cut_content, cut_calls = parsed(maker(name), [row["text"][:at]])

            shared = min(len(content), len(cut_content))
            assert cut_content[:shared].strip() == content[:shared].strip()
            assert [one[0] for one in cut_calls] == [one[0] for one in calls[: len(cut_calls)]]
            assert cut_calls[:-1] == calls[: max(len(cut_calls) - 1, 0)]
            if cut_calls:
                begun_marker = cut_calls[-1][1].rpartition("<")[0].removesuffix("\\n")
                assert calls[len(cut_calls) - 1][1].startswith((cut_calls[-1][1], begun_marker))


@pytest.mark.covers("B.tools.9")
@pytest.mark.parametrize("name", FORMATS)
def test_cut_texts_have_the_complete_calls_that_vllm_has(name: str) -> None:
    for row in rows(name, "cut"):
        ours = parsed(maker(name), [row["text"]])

        check_every_cut(maker(name), row["text"], ours)
        assert any(_agrees(comparable(ours), theirs) for theirs in both(row)), (row["text"], ours)


def _agrees(ours: Any, theirs: Any) -> bool:
    """Return whether what is complete is the same, but for the last call, which vLLM may close, or leave out."""
    mine, other = ([one for one in made[1] if isinstance(one[1], dict)] for made in (ours, theirs))
    shared = min(len(mine), len(other))
    return (
        ours[0].startswith(theirs[0].strip()) and mine[:shared] == other[:shared] and abs(len(mine) - len(other)) <= 1
    )


def kept(*texts: str) -> dict[str, Made]:
    """Return that texts are content, as they are."""
    return {text: (text, []) for text in texts}


def deepseek(call: str) -> dict[str, Made]:
    """Return what differs for both forms of DeepSeek's calls."""
    begin, end, call_end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>"
    lines = '{\n "text": "a"\n}'
    no_call = f"{begin}<｜tool▁call▁begin｜>no{call_end}{end}"
    return kept(begin, begin + end, no_call, begin + call % "no" + end) | {
        begin + call % lines + end: ("", [("f1", lines)])
    }


def kimi(call_id: str, arguments: str) -> str:
    """Return a section of one call of Kimi K2."""
    call = f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
    return f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"


V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f1\n```json\n%s\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>f1<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
V31_MARKED = '{"text": "<｜tool▁call▁end｜>"}'
KIMI_MARKED = '{"text": "<|tool_call_end|>"}'
KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
FIVE = ("f1", '{"count": 5}')
CODER = "<tool_call>\n<function=f1>\n<parameter=count>\n5\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>%s\n<arg_key>count</arg_key>\n<arg_value>5</arg_value>\n</tool_call>"
OTHER = "<tool_call>no</tool_call>"
OURS: dict[str, dict[str, Made]] = {
    "hermes": kept('<tool_call>{"name": "", "arguments": {}}</tool_call>') | {
        '<tool_call>{"name": "f", "arguments": {"a": ]}}</tool_call>': ("", [("f", '{"a": ]')]),
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>':
            ("", [("f", '{"a": "</tool_call>"}')]),
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>' + OTHER: (OTHER, [("f", "{}")]),
    },
    "qwen3_coder": kept("<tool_call>", OTHER, "<tool_call>\n<function=\n</function></tool_call>") | {
        f"{CODER}\n{OTHER}": (OTHER, [FIVE]),
    },
    "glm45": kept("<tool_call>", OTHER, GLM % "unknown") | {GLM % "f1" + OTHER: (OTHER, [FIVE])},
    "deepseek_v3": deepseek(V3),
    "deepseek_v31": deepseek(V31) | {
        f"<｜tool▁calls▁begin｜>{V31 % V31_MARKED}<｜tool▁calls▁end｜>": ("", [("f1", V31_MARKED)]),
    },
    "kimi_k2": kept(
        KIMI_BEGIN, KIMI_BEGIN + KIMI_END, f"{KIMI_BEGIN}<|tool_call_begin|>no<|tool_call_end|>{KIMI_END}",
        kimi("functions.f1:x", "{}"), kimi("functions.f1:0", "no"),
    ) | {kimi("functions.f1:0", KIMI_MARKED): ("", [("f1", KIMI_MARKED)])},
    "llama3_json": {
        'Let me look.<|python_tag|>{"name": "f1", "parameters": {"count": 5}}': ("Let me look.", [FIVE]),
        '{"name": "f1", "parameters": {"count": ]}}': ("", [("f1", '{"count": ]')]),
    },
    "mistral": kept(
        "[TOOL_CALLS]", "[TOOL_CALLS]no", "[TOOL_CALLS] []", "[TOOL_CALLS][{}]", '[TOOL_CALLS]{"name": "f1"}'
    ) | {
        '[TOOL_CALLS][{"name": "f1", "arguments": {"text": "[TOOL_CALLS]"}}]':
            ("", [("f1", '{"text": "[TOOL_CALLS]"}')]),
    },
    "mistral_v11": kept("[TOOL_CALLS]", "[TOOL_CALLS]no", "[TOOL_CALLS]f1[ARGS]", "[TOOL_CALLS]f1[ARGS]no") | {
        '[TOOL_CALLS]f1[CALL_ID]abcdefghi[ARGS]{"count": 5}': ("", [FIVE]),
        '[TOOL_CALLS]f1[ARGS]{"text": "[TOOL_CALLS]"}': ("", [("f1", '{"text": "[TOOL_CALLS]"}')]),
    },
    "pythonic": {
        "[f1(text='a\nb')]": ("", [("f1", '{"text": "a\\nb"}')]),
        "[f1(text='a' 'b')]": (" 'b')]", [("f1", '{"text": "a"')]),
        "[f1(count=5), 3]": ("3]", [FIVE]),
        "\n[f1(count=5)]": ("", [FIVE]),
    },
    "llama4_pythonic": kept("<|python_start|>no<|python_end|>"),
}  # fmt: skip
"""Our results where vLLM drops text, ends a call at a marker within a text, or reads it differently when streamed."""


@pytest.mark.covers("B.tools.9")
@pytest.mark.parametrize("name", FORMATS)
def test_malformed_texts_are_read_as_in_vllm_or_stay_content(name: str) -> None:
    known = OURS.get(name, {})
    differ = set()
    for row in rows(name, "malformed"):
        ours = parsed(maker(name), [row["text"]])
        check_every_cut(maker(name), row["text"], ours)
        if comparable(ours) not in both(row):
            differ.add(row["text"])
            assert ours == known.get(row["text"]), row["text"]

    assert differ == set(known)


def value(text: str) -> str:
    """Return a call with one argument."""
    return f"[f1(v={text})]"


LINK = "[f1(a=x) is a link] text after"
VALUES = {
    "(1)": "1", "((1))": "1", "(1,)": "[1]", "()": "[]", "('a')": '"a"', "([1], )": "[[1]]",
    "{1: 2, True: 3, None: [4]}": '{"1": 2, "true": 3, "null": [4]}', "{1.5: {}, (2): 3}": '{"1.5": {}, "2": 3}',
    "{1, 2}": "[1, 2]", "{'a'}": '["a"]', "{'a': {'b': (2)}}": '{"a": {"b": 2}}', "- 5": "-5",
    "[+ 1.5, -2]": "[1.5, -2]", r"r'a\nb\''": r'"a\\nb\\' + "'" + '"', "u'é'": '"é"',
    r"'\N{BULLET} \N{LATIN SMALL LETTER A}'": '"• a"',
    "f'x{{1}}'": '"x{1}"', "[1, # c, 2\n 2 # d\n]": "[1, 2]",
}  # fmt: skip
READ: dict[str, dict[str, Made]] = {
    "pythonic": kept(
        LINK, "[f1(a=x)]", "[f1() is a link]", "[f1(a=1 apple)]", "[f1(a=f)]", "[f1(a=", "[f1(a=-", "[f1(a=tru",
    ) | {value(text): ("", [("f1", f'{{"v": {read_as}}}')]) for text, read_as in VALUES.items()} | {
        "[f1(a='b', c=x) is a link] text": ("x) is a link] text", [("f1", '{"a": "b", "c": ')]),
        "[f1(a='b' 'c')] text": (" 'c')] text", [("f1", '{"a": "b"')]),
        "[f1(a={[1]: 2})] text": (": 2})] text", [("f1", '{"a": ')]),
        "[f1(a=f'{b}')] text": ("{b}')] text", [("f1", '{"a": "')]),
        r"[f1(a='\N{no}')] text": (r"\N{no}')] text", [("f1", '{"a": "')]),
        "[f1(a='b'), f2(c=x)] text": ("f2(c=x)] text", [("f1", '{"a": "b"}')]),
        "[f1(a='b'), # c\n f2(c=1), # d\n]": ("", [("f1", '{"a": "b"}'), ("f2", '{"c": 1}')]),
        "[f1(a='b', # c\n c=1)]": ("", [("f1", '{"a": "b", "c": 1}')]),
        "[f1(a='b', co": ("", [("f1", '{"a": "b"')]),
        "[f1(a={'b'": ("", [("f1", '{"a": ')]),
        "[f1(a=['b' ": ("", [("f1", '{"a": ["b"')]),
        "[f1(i=007)]": ("", [("f1", '{"i": 7}')]),
        "[get-weather(a=1)]": ("", [("get-weather", '{"a": 1}')]),
    },
    "qwen3_coder": kept("Use <function=f1> in text. ok", "<function=f1>", "<tool_call><function=f1>no</tool_call>") | {
        "a <function=f1> \n</function> b": ("a ", [("f1", "{}")]),
        f"<function=f1><parameter={'k' * 9000}>x</parameter></function>": ("", [("f1", f'{{"{"k" * 9000}": "x"}}')]),
    },
    "glm45": {
        f"<tool_call>f1<arg_key>{'k' * 9000}</arg_key><arg_value>x</arg_value></tool_call>":
            ("", [("f1", f'{{"{"k" * 9000}": "x"}}')]),
    },
    "hermes": {
        '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}</tool_call>': ("", [("f", '{"a": "\\ud800"}')]),
        '<tool_call>{"arguments": {"a": 1e999}, "name": "f"}</tool_call>': ("", [("f", '{"a": 1e999}')]),
    },
}  # fmt: skip
"""What we read in texts that vLLM's table does not have."""


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in READ.items() for text in texts])
def test_more_texts_are_calls_or_content_however_cut(name: str, text: str) -> None:
    expected = READ[name][text]

    assert parsed(maker(name), [text]) == parsed(maker(name), text) == expected
    if len(text) < 1000:
        check_every_cut(maker(name), text, expected)


SIGNS = [
    '{"name": "f1", "arguments": ', '{"name": "f1", "parameters": ', '{"a": 1}', "{", "}", "[", "]", '"', "\\", ",",
    " ", "\n", "x", "é", "</", "<", "f1", "(", ")", "a=", "'", ";", "-1.5", "5>", "true", "```json", "functions.f1:0",
]  # fmt: skip
MORE_MARKERS = {
    "qwen3_coder": [
        "<function=f1>", "<function=", "</function>", "<parameter=text>", "<parameter=count>", "</parameter>",
    ],
    "pythonic": [
        "[f1(", "text='", "'''", "count=", "options={'a': ", "\\u00e9", "\\x4", "r'", "f'", "\\N{", "{1: ", "# ",
    ],
}  # fmt: skip


def random_texts(name: str, count: int) -> list[str]:
    """Return random texts of the signs that a format looks at."""
    chance = random.Random(7)
    signs = [*SIGNS, *2 * [*FORMATS[name].markers, *MORE_MARKERS.get(name, ())]]
    return ["".join(chance.choices(signs, k=chance.randrange(30))) for _ in range(count)]


@pytest.mark.covers("B.tools.18")
@pytest.mark.parametrize("name", FORMATS)
def test_any_text_is_parsed_the_same_however_cut(name: str) -> None:
    for text in random_texts(name, 40):
        check_every_cut(maker(name), text, parsed(maker(name), [text]))


def test_a_list_that_is_no_call_is_not_held_back() -> None:
    parser = maker("pythonic")()
    sent = [parser.push(sign).content for sign in "[a link](https://example.org)"]

    assert "".join(sent[:5]) == "[a li"


HARD = (
    "[f(", "<tool_call>", "</tool_call>", "{", "[", "\\", '"', "'", " ", "functions.f:0", "1, ", '{"name": "f", ',
    "<function=f><parameter=", "<tool_call>f<arg_key>", "[TOOL_CALLS]", "<｜tool▁sep｜>", "<|channel|>", "é",
)  # fmt: skip
"""What a model may repeat without an end."""


@pytest.mark.parametrize("name", sorted({FORMATS[name].parser for name in FORMATS} | {"openai"}))
def test_the_text_that_waits_to_be_read_is_bounded(name: str) -> None:
    """So the work for a token is bounded too: a step looks at this text."""
    for text in HARD:
        parser = StepParser(CALL_FORMATS[name].steps, schemas_by_name(TOOLS))
        for at in range(0, 4 * MAX_HEAD_CHARS, 4):
            parser.push((text * 2 * MAX_HEAD_CHARS)[at : at + 4])
            assert len(parser._reader.text) <= MAX_HEAD_CHARS + 4, text
