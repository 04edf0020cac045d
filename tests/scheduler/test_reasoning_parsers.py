"""Models' texts become thinking and content: the same however a text is cut, and nothing raises."""

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from scheduler.reasoning.formats import REASONING_FORMATS, ReasoningState
from scheduler.reasoning.options import ReasoningOptions
from scheduler.reasoning.parser import ReasoningParser
from scheduler.text.parsed_choice import ParsedChoice
from scheduler.text.pieces import TextOptions, TextPiece
from tests.scheduler.reasoning_by_vllm import Tokenizer
from wire.types import TokenOutput

TABLE = json.loads((Path(__file__).parent / "reasoning_by_vllm.json").read_text(encoding="utf-8"))
"""What vLLM's own parsers make of texts: reasoning_by_vllm.py writes it."""
GRANITE = "Here is my thought process:"
OURS = {
    ("deepseek_r1", "a</think><think>"): ["a", "<think>"],
    ("granite", f"{GRANITE}tool_call>Here is my r"): ["tool_call>Here is my r", ""],
    ("granite", f"{GRANITE}x\n\nyHere's"): ["x\n\nyHere's", ""],
    ("granite", f"{GRANITE}Here is my\n"): ["Here is my\n", ""],
    ("granite", f"{GRANITE}Here is my"): ["Here is my", ""],
    ("granite", f"{GRANITE}aHere is my thought process:bHere is my response:c"): ["ab", "c"],
}
"""What we make of texts for which vLLM's whole and streamed answers differ, and one of them loses text."""


def split(
    name: str, pieces: Iterable[str], begin: ReasoningState | None = None, *, has_calls: bool = False
) -> list[str]:
    """Return the thinking and the content of a text in pieces."""
    text_format = REASONING_FORMATS[name]
    parser = ReasoningParser(text_format, begin or text_format.begin, has_calls=has_calls)
    made = [*map(parser.push, pieces), parser.flush()]
    return ["".join(one.reasoning for one in made), "".join(one.content for one in made)]


@pytest.mark.covers("B.reasoning.2")
@pytest.mark.parametrize("name", ["deepseek_r1", "glm45", "granite", "mistral", "qwen3"])
def test_thinking_is_as_vllm_finds_it(name: str) -> None:
    rows = [row for row in TABLE if row["name"] == name]
    assert len(rows) > 50

    for row in rows:
        made, text = split(name, [row["text"]]), row["text"]
        if (name, text) in OURS:
            assert made == OURS[name, text]
        elif row["whole"] == row["streamed"]:
            assert made == row["whole"]
        else:
            assert made in (row["whole"], row["streamed"]), text


def each_cut(text: str) -> Iterable[list[str]]:
    """Return `text` cut once at each place, and at random ones."""
    yield list(text)
    yield from ([text[:at], text[at:]] for at in range(len(text)))
    for seed in range(10):
        chance = random.Random(seed)
        places = sorted(chance.randrange(len(text) + 1) for _ in range(5))
        yield [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.covers("B.reasoning.2")
@pytest.mark.parametrize("name", ["deepseek_r1", "glm45", "granite", "mistral", "qwen3"])
def test_thinking_is_the_same_however_cut(name: str) -> None:
    for row in TABLE[::3]:  # also those of other formats
        whole = split(name, [row["text"]])
        for pieces in each_cut(row["text"]):
            assert split(name, pieces) == whole, pieces


@pytest.mark.parametrize("name", ["deepseek_r1", "glm45", "granite", "mistral", "qwen3"])
def test_a_parser_that_keeps_all_leaves_nothing_out(name: str) -> None:
    text_format = REASONING_FORMATS[name]
    for row in TABLE:
        parser = ReasoningParser(text_format, text_format.begin, has_calls=True, keeps_all=True)
        made = [*map(parser.push, row["text"]), parser.flush()]
        assert "".join(one.reasoning + one.content for one in made) == row["text"]


CALL = '<tool_call>{"name": "f", "arguments": {"a": "</think>"}}</tool_call>'


@pytest.mark.parametrize(
    ("name", "begin", "has_calls", "text", "expected"),
    [
        ("qwen3", None, True, f"Hm{CALL}", ["Hm", CALL]),
        ("qwen3", None, True, f"Hm</think>\n{CALL}</think>", ["Hm", f"\n{CALL}</think>"]),
        ("qwen3", None, False, "Hm <tool_call> no</think>yes", ["Hm <tool_call> no", "yes"]),
        ("qwen3", ReasoningState.CONTENT, True, CALL, ["", CALL]),
        ("glm45", None, True, f"Hm \n{CALL}", ["Hm", CALL]),
        ("deepseek_r1", None, True, f"Hm{CALL}", ['Hm<tool_call>{"name": "f", "arguments": {"a": "',
                                                  '"}}</tool_call>']),
        ("deepseek_r1", ReasoningState.CONTENT, False, "<think>a</think>", ["", "<think>a</think>"]),
        ("mistral", ReasoningState.THINKING, True, "Hm[TOOL_CALLS]f{}", ["Hm", "[TOOL_CALLS]f{}"]),
        ("mistral", ReasoningState.CONTENT, True, "a[THINK]b[/THINK]c", ["b", "ac"]),
    ],
)  # fmt: skip
def test_calls_and_prompts_end_the_thinking(
    name: str, begin: ReasoningState | None, has_calls: bool, text: str, expected: list[str]
) -> None:
    assert split(name, [text], begin, has_calls=has_calls) == expected
    assert all(split(name, pieces, begin, has_calls=has_calls) == expected for pieces in each_cut(text))


def test_only_what_may_begin_a_marker_is_held_back() -> None:
    parser = ReasoningParser(REASONING_FORMATS["qwen3"], ReasoningState.THINKING)

    made: list[Any] = [parser.push("<") for _ in range(1000)]

    assert "".join(one.reasoning for one in made) == "<" * 999


@pytest.mark.parametrize("name", ["deepseek_r1", "glm45", "mistral", "qwen3"])
@pytest.mark.parametrize("text", [" ", "\n", "<", "a"])
def test_the_work_is_proportional_to_the_text(name: str, text: str) -> None:
    parser, num_chars = ReasoningParser(REASONING_FORMATS[name], ReasoningState.THINKING), 0

    def count(_frame: Any, event: str, method: Any) -> None:
        nonlocal num_chars
        if event == "c_call" and isinstance(method.__self__, str):
            num_chars += len(method.__self__)

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        made = [parser.push(text) for _ in range(2000)]
    finally:
        sys.setprofile(before)

    assert num_chars < 2000 * 50
    assert "".join(one.reasoning for one in [*made, parser.push("b")]).endswith(text * 1999 + "b")


class PlainChoice:
    """A Choice of given texts, one for each token."""

    num_tokens = 0

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def push(self, token: TokenOutput) -> TextPiece:
        return TextPiece(0, self._texts[token.index], tokens=(token,))


@pytest.mark.parametrize("name", ["deepseek_r1", "glm45", "mistral", "qwen3"])
def test_tokens_of_thinking_are_counted_as_vllm_does(name: str) -> None:
    text_format = REASONING_FORMATS[name]
    options = TextOptions(reasoning=ReasoningOptions(text_format, text_format.begin))
    for row in TABLE:
        text: str = row["text"]
        counts_all = name != "deepseek_r1" or (text.startswith("<think>") and text.count("<think>") == 1)
        if row["name"] != name or not counts_all:  # vLLM counts R1's only after <think>, also in the content
            continue
        tokens = Tokenizer().encode_tokens(text)
        plain: Any = PlainChoice([one for one, _ in tokens])
        choice = ParsedChoice(plain, 0, options)
        for index, (_, token_id) in enumerate(tokens):
            choice.push(TokenOutput("p", 0, index, token_id))

        assert choice.num_reasoning_tokens == row["num_tokens"], text
