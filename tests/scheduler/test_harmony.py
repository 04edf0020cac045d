"""gpt-oss's answers: messages with channels, of which the client gets the content and the calls."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from scheduler.tools.call_reader import StepParser
from scheduler.tools.parsers.harmony import MARKERS, harmony
from tests.scheduler.test_reasoning_parsers import each_cut, split
from tests.scheduler.test_tool_calls import AUTO, PARIS, answers, shown
from tests.scheduler.test_tool_parsers import Made, check_every_cut, parsed

make = partial(StepParser, harmony)
THINKING = "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}'
FINAL = "<|start|>assistant<|channel|>final<|message|>Hello"
WEATHER = ("weather", '{"city": "Paris"}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>final<|message|>Hello <b>é</b>.", ("Hello <b>é</b>.", [])),
        ("<|channel|>final<|message|>Hello.<|return|>", ("Hello.", [])),
        (THINKING + "<|channel|>final<|message|>Hello.", ("Hello.", [])),
        (THINKING + CALL, ("", [WEATHER])),
        (THINKING + CALL + "<|call|>", ("", [WEATHER])),
        (CALL + "<|call|><|start|>assistant" + CALL + "<|call|>", ("", [WEATHER, WEATHER])),
        ("<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant" + CALL, ("Let me look.", [WEATHER])),
        (' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}', ("", [WEATHER])),
        ('<|start|>assistant to=functions.weather<|channel|>commentary<|message|>{"city": "Paris"}', ("", [WEATHER])),
        ("<|channel|>commentary to=functions.now <|constrain|>json<|message|><|call|>", ("", [("now", "{}")])),
        ('<|channel|>commentary to=functions.now <|message|>{"a": 1', ("", [("now", '{"a": 1')])),
        ("<|channel|>commentary to=functions.now json<|message|>plain text<|call|>", ("", [("now", "plain text")])),
        ("<|channel|>analysis to=browser.search json<|message|>{}<|call|>", ("", [])),
        ("<|channel|>commentary to=python<|message|>1 + 1<|call|>", ("", [])),
        ("<|channel|>final<|message|>One.<|channel|>final<|message|> Two.", ("One. Two.", [])),
        ("<|channel|>fin", ("", [])),
        ("<|channel|>" + "x" * 1100, ("<|channel|>" + "x" * 1100, [])),
        ('{"city": "Paris"}', ('{"city": "Paris"}', [])),
        ("to=be or not", ("to=be or not", [])),
        ("tomorrow", ("tomorrow", [])),
        ("", ("", [])),
    ],
)
def test_messages_become_content_and_calls_however_cut(text: str, expected: Made) -> None:
    if len(text) < 1000:
        check_every_cut(make, text, expected)
    assert parsed(make, text) == parsed(make, [text]) == expected


ROWS = json.loads(Path(__file__).with_name("harmony_by_openai.json").read_text(encoding="utf-8"))
OURS: dict[str, Made] = {
    "<|message|>": ("<|message|>", []),
    "<|message|>Hello": ("<|message|>Hello", []),
    "<|call|><|channel|>final<|message|>a": ("<|call|>a", []),
    "<|channel|>final<|channel|>final<|message|>a": ("a", []),
    "<|channel|>final<|message|>One.<|channel|>final<|message|> Two.": ("One. Two.", []),
    "<|channel|>commentary to=<|message|>a": ("a", []),
    "<|channel|>commentary to=functions.<|message|>{}<|call|>": ("", []),
}
"""Our results for malformed headers that OpenAI's parser accepts: it takes markers for text or for a recipient."""


def made_of(messages: list[Any]) -> Made:
    """Return what the messages of OpenAI's parser are for a client; text after a call is left out."""
    content, calls = "", []
    for channel, recipient, text in messages:
        if recipient is not None and recipient.startswith("functions."):
            calls.append((recipient.removeprefix("functions."), text))
        elif recipient is None and channel in ("final", "commentary") and not calls:
            content += text
    return content, calls


@pytest.mark.covers("B.tools.9")
def test_messages_are_those_of_openais_own_parser() -> None:
    differ = set()
    for row in ROWS:
        ours = parsed(make, [row["text"]])
        check_every_cut(make, row["text"], ours)
        if row["messages"] is None:
            continue  # it raises an error
        content, calls = made_of(row["messages"])
        if row["group"] != "cut":
            calls = [(name, arguments or "{}") for name, arguments in calls]
        if ours != (content, calls):
            differ.add(row["text"])
            assert ours == OURS.get(row["text"]), row["text"]

    assert differ == set(OURS)


@pytest.mark.covers("B.reasoning.2")
def test_thinking_is_that_of_openais_own_parser_however_cut() -> None:
    for row in ROWS:
        if row["group"] == "malformed" or row["messages"] is None:
            continue
        thinking = "".join(text for channel, to, text in row["messages"] if (channel, to) == ("analysis", None))
        for pieces in ([row["text"]], *each_cut(row["text"])):
            reasoning, rest = split("openai_gptoss", pieces)
            assert reasoning == thinking, pieces
            assert parsed(make, [rest]) == parsed(make, [row["text"]])


@pytest.mark.covers("B.tools.18")
def test_any_messages_are_read_the_same_however_cut() -> None:
    chance = random.Random(3)
    words = ["assistant", "analysis", "final", "commentary", " to=functions.f", "{}", "x", " ", "<|", "é"]
    signs = [*MARKERS, *MARKERS, *words]
    for _ in range(100):
        text = "".join(chance.choices(signs, k=chance.randrange(20)))
        check_every_cut(make, text, parsed(make, [text]))


@pytest.fixture
def special(make_model: Any) -> Path:
    """Return a model whose special tokens are the markers, and whose template shows them."""
    folder: Path = make_model(chat_template="{# <|start|><|channel|><|message|> #}{{ messages[0].content }}")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in MARKERS])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.anyio
@pytest.mark.usefixtures("one_renderer")
@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        (THINKING + CALL, AUTO, ("", [PARIS], None, "tool_calls")),
        (THINKING + CALL, AUTO | {"tool_choice": "none"}, ("", [], None, "stop")),
        (CALL + "<|call|>" + FINAL + "<|return|>", AUTO | {"tool_choice": "none"}, ("Hello", [], None, "stop")),
        (CALL + "<|call|>" + FINAL + " END.", {"stop": "END"}, ("Hello ", [], None, "stop")),
        (THINKING + "<|channel|>final<|message|>Hello.", AUTO, ("Hello.", [], None, "stop")),
        (THINKING + "<|channel|>final<|message|>Hello.", {}, ("Hello.", [], None, "stop")),
        (THINKING + "<|channel|>final<|message|>Hello. Bye.", {"stop": "Need"}, ("Hello. Bye.", [], None, "stop")),
        (THINKING + "<|channel|>final<|message|>Hello. Bye.", {"stop": "."}, ("Hello", [], None, "stop")),
    ],
)
async def test_all_chats_of_such_a_model_are_read(
    serve: Any, special: Path, text: str, fields: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    whole, streamed, _ = await answers(serve, text, fields, folder=special)

    assert shown(whole) == shown(streamed) == [expected]
