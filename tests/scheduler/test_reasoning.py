"""Chats of reasoning models over a scripted dispatcher: thinking, content, calls and counts, whole and streamed."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.scheduler.reasoning_chats import (
    ASKS,
    CLOSED,
    FORCED,
    FORM,
    NAMES,
    OPEN,
    TOOLS,
    ask,
    prefilled,
    said,
    shown,
    write_reasoning_model,
)
from tests.scheduler.test_tool_history import USER

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_renderer")]

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "a</think>b"}}\n</tool_call>'
WRITTEN = CALL.replace("</think>", "")
"""As content, where a second end of the thinking is left out."""
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
WEATHER = 'commentary to=functions.weather <|constrain|>json<|message|>{"city": "a</think>b"}<|call|>'
OPENAI = {"tool_call_parser": "openai"}
CALLED = 'weather{"city": "a</think>b"}'
BOTH: dict[str, Any] = {"tool_call_parser": "hermes"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with markers of thinking."""
    return write_reasoning_model(tmp_path_factory.mktemp("reasoning-model"))


@pytest.mark.covers("B.reasoning.1")
@pytest.mark.parametrize(
    ("parser", "text", "fields", "options", "expected"),
    [
        ("qwen3", "<think>\nHm.\n</think>\n\nYes.", {}, {}, ("\nHm.\n", "\n\nYes.", "", "stop")),
        ("qwen3", "Hm.</think>Yes.", {}, {"chat_template": OPEN}, ("Hm.", "Yes.", "", "stop")),
        ("qwen3", "Yes.", {}, {"chat_template": CLOSED}, ("", "Yes.", "", "stop")),
        ("deepseek_r1", "Yes.", {}, {"chat_template": CLOSED}, ("", "Yes.", "", "stop")),
        ("qwen3", "Yes.", {"chat_template_kwargs": {"enable_thinking": False}}, {}, ("", "Yes.", "", "stop")),
        ("qwen3", "Yes.", {}, {"default_chat_template_kwargs": '{"enable_thinking": false}'}, ("", "Yes.", "", "stop")),
        ("qwen3", "Yes.", {"reasoning_effort": "none"}, {}, ("", "Yes.", "", "stop")),
        ("qwen3", "Hm.</think>", {"reasoning_effort": "low"}, {}, ("Hm.", "", "", "stop")),
        ("deepseek_v3", "Yes.", {}, {}, ("", "Yes.", "", "stop")),
        ("deepseek_v3", "Hm.</think>Yes.", {"chat_template_kwargs": {"thinking": True}}, {},
         ("Hm.", "Yes.", "", "stop")),
        ("deepseek_v3", "Hm.</think>Yes.", {"chat_template_kwargs": {"thinking": True, "enable_thinking": False}}, {},
         ("Hm.", "Yes.", "", "stop")),
        ("deepseek_v3", "Hm.</think>Yes.", {"chat_template_kwargs": {"enable_thinking": True}}, {},
         ("Hm.", "Yes.", "", "stop")),
        ("deepseek_v3", "Yes.", {"reasoning_effort": "none"},
         {"default_chat_template_kwargs": '{"thinking": true}'}, ("", "Yes.", "", "stop")),
        ("glm45", "Yes.", {"chat_template_kwargs": {"thinking": False}}, {}, ("", "Yes.", "", "stop")),
        ("glm45", "Yes.", {"chat_template_kwargs": {"enable_thinking": False}}, {}, ("", "Yes.", "", "stop")),
        ("mistral", "[THINK]Hm.[/THINK]Yes<x>.", {}, {}, ("Hm.", "Yes.", "", "stop")),
        ("granite", "Here is my thought process: Hm. Here is my response: Yes.", {}, {},
         (" Hm. ", " Yes.", "", "stop")),
        ("openai_gptoss", f"{ANALYSIS}<|channel|>final<|message|>Yes.", {}, OPENAI, ("Hm.", "Yes.", "", "stop")),
        ("openai_gptoss", f"{ANALYSIS}{ANALYSIS}<|channel|>{WEATHER}", TOOLS, OPENAI,
         ("Hm.Hm.", "", CALLED, "tool_calls")),
        ("openai_gptoss", "<|channel|>analysis<|message|>Hm.", {}, OPENAI, ("Hm.", "", "", "stop")),
        ("qwen3", "a hello b</think>c hello d", {"stop": "hello"}, {}, ("a hello b", "c ", "", "stop")),
        ("qwen3", "a</think>b", {"messages": [USER, {"role": "assistant", "content": "x</think>"}, USER]}, {},
         ("a", "b", "", "stop")),
        ("qwen3", "a</think>b", said("x</think>"), {"chat_template": ASKS}, ("a", "b", "", "stop")),
        ("mistral", "Yes.", said("What is [THINK]?"), {"chat_template": ASKS}, ("", "Yes.", "", "stop")),
        ("qwen3", "a</think>b", said("x</think>"), {"chat_template": f"{ASKS}<think>"}, ("a", "b", "", "stop")),
        ("qwen3", "a", said("<think>"), {"chat_template": f"{ASKS}<think></think>"}, ("", "a", "", "stop")),
        ("qwen3", "a", said("<think>"), {"chat_template": f"{NAMES}<think></think>"}, ("", "a", "", "stop")),
        ("qwen3", "a", prefilled("Well"), {}, ("", "a", "", "stop")),
        ("deepseek_r1", "a", prefilled("Well") | FORM, {}, ("", "a", "", "stop")),
        ("qwen3", "a</think>b", prefilled("<think>Well"), {}, ("a", "b", "", "stop")),
        ("qwen3", "a</think>b", prefilled("<think>Well"), {"chat_template": NAMES}, ("a", "b", "", "stop")),
        ("mistral", "a", prefilled("Well"), {"chat_template": NAMES}, ("", "a", "", "stop")),
        ("qwen3", f"Hm.</think>Sure. {CALL}", TOOLS, BOTH, ("Hm.", "Sure. ", CALLED, "tool_calls")),
        ("qwen3", f"Hm. {CALL}", TOOLS, BOTH, ("Hm. ", "", CALLED, "tool_calls")),
        ("deepseek_r1", f"Hm.</think>{CALL}", TOOLS, BOTH, ("Hm.", "", CALLED, "tool_calls")),
        ("qwen3", f"Hm.</think>{CALL}", TOOLS | {"tool_choice": "none"}, BOTH, ("Hm.", WRITTEN, "", "stop")),
        ("qwen3", f"Hm.</think>{CALL}", {}, {}, ("Hm.", WRITTEN, "", "stop")),
        ("qwen3", "Hm.</think>Yes.", {"echo": True, "add_generation_prompt": False}, {}, None),
    ],
)  # fmt: skip
async def test_thinking_comes_before_content_and_calls(
    serve: Any, folder: Path, parser: str, text: str, fields: Any, options: Any, expected: tuple[str, ...] | None
) -> None:
    for asked in ({}, {"logprobs": True, "return_token_ids": True}):
        whole, streamed, _ = await ask(serve, folder, text, fields | asked, parser=parser, **options)

        assert shown(whole) == shown(streamed)
        assert whole["usage"] == streamed["usage"]
        if expected is not None:
            assert shown(whole) == [expected]


@pytest.mark.covers("B.reasoning.3")
async def test_every_cut_of_an_answer_is_counted(serve: Any, folder: Path) -> None:
    text = f"<think>\nHm.</think>Sure. {CALL}"
    num_thinking = len(Tokenizer.from_file(f"{folder}/tokenizer.json").encode("\nHm.").ids)

    for cut in range(1, 12):
        short, streamed, _ = await ask(serve, folder, text, TOOLS, cut=cut, **BOTH)

        assert shown(short) == shown(streamed)
        assert short["choices"][0]["finish_reason"] == "length"
        details = short["usage"]["completion_tokens_details"]
        assert (
            details
            == streamed["usage"]["completion_tokens_details"]
            == {"reasoning_tokens": min(cut - 1, num_thinking)}
        )
        if cut <= num_thinking:
            assert short["choices"][0]["message"]["content"] is None


async def test_each_of_n_choices_thinks(serve: Any, folder: Path) -> None:
    text = "Hm.</think>Yes."
    one, _, _ = await ask(serve, folder, text, {})
    whole, streamed, _ = await ask(serve, folder, text, {"n": 3, "best_of": 3})
    best, _, _ = await ask(serve, folder, text, {"n": 1, "best_of": 2})

    assert shown(whole) == shown(streamed) == shown(one) * 3
    assert shown(best) == shown(one)
    counts = [answer["usage"]["completion_tokens_details"]["reasoning_tokens"] for answer in (one, whole, best)]
    assert counts == [counts[0], counts[0] * 3, counts[0] * 2]
    assert counts[0] > 0


async def test_log_probabilities_are_of_every_token(serve: Any, folder: Path) -> None:
    fields = {"logprobs": True, "return_token_ids": True}
    whole, streamed, _ = await ask(serve, folder, "Hm.</think>Yes.", fields)
    hidden, hidden_stream, _ = await ask(serve, folder, "Hm.</think>Yes.", fields | {"include_reasoning": False})

    (choice,), (part,) = whole["choices"], hidden["choices"]
    tokens = [one["token"] for one in choice["logprobs"]["content"]]
    assert tokens == streamed["choices"][0]["tokens"]
    assert len(tokens) == len(choice["token_ids"]) == whole["usage"]["completion_tokens"]
    assert "</think>" in tokens
    after = tokens[tokens.index("</think>") + 1 :]
    assert [one["token"] for one in part["logprobs"]["content"]] == hidden_stream["choices"][0]["tokens"] == after
    assert part["token_ids"] == choice["token_ids"][-len(after) :]
    assert shown(hidden) == shown(hidden_stream) == [("", "Yes.", "", "stop")]
    assert hidden["usage"] == whole["usage"]


@pytest.mark.covers("B.reasoning.6")
async def test_hidden_thinking_leaves_the_tokens_of_held_back_content(serve: Any, folder: Path) -> None:
    fields = {"logprobs": True, "include_reasoning": False, "stop": "abX"}
    whole, streamed, _ = await ask(serve, folder, "Hm.</think>ab<think>c</think>d", fields, parser="glm45")

    assert shown(whole) == shown(streamed) == [("", "abd", "", "stop")]
    tokens = [one["token"] for one in whole["choices"][0]["logprobs"]["content"]]
    assert "".join(tokens) == "".join(streamed["choices"][0]["tokens"])
    assert "".join(tokens).startswith("abd")


async def test_without_a_parser_thinking_is_content(serve: Any, folder: Path) -> None:
    whole, streamed, _ = await ask(serve, folder, "Hm.</think>Yes.", {"include_reasoning": False}, parser=None)

    assert shown(whole) == shown(streamed) == [("", "Hm.</think>Yes.", "", "stop")]
    assert "completion_tokens_details" not in whole["usage"]


@pytest.mark.covers("B.reasoning.6")
@pytest.mark.parametrize(
    ("parser", "text", "fields", "expected"),
    [
        ("qwen3", "<think>\nHm.</think>Yes.", {"thinking_token_budget": 5}, None),
        ("qwen3", "<think><think>Hm.</think></think>\nYes.", {"chat_template": OPEN}, None),
        ("glm45", "Hm. \n</think>\n<think>a</think> b", {}, None),
        ("glm45", "a</think>x b<think>x c</think>d", {"stop": "x c"}, None),
        ("mistral", "[THINK]Hm.[/THINK]Yes.", {}, None),
        ("granite", "Here is my thought process: Hm. Here is my response: Yes.", {}, None),
        ("qwen3", "a hello b</think>c hello d", {"stop": "hello"}, ("a hello b</think>c ", "", "stop")),
        ("qwen3", "a</think>b", {"include_reasoning": False}, ("b", "", "stop")),
        ("deepseek_r1", f"Hm. {WRITTEN}</think>{CALL}", TOOLS, (f"Hm. {WRITTEN}</think>", CALLED, "tool_calls")),
        ("qwen3", 'Hm.</think>[{"name": "weather", "parameters": {"city": "a"}}]', FORCED,
         ("Hm.</think>", 'weather{"city": "a"}', "tool_calls")),
    ],
)  # fmt: skip
async def test_thinking_stays_in_the_text_on_request(
    serve: Any, folder: Path, parser: str, text: str, fields: Any, expected: Any
) -> None:
    asked = fields | {"separate_reasoning": False}
    whole, streamed, dispatcher = await ask(serve, folder, text, asked, parser=parser, **BOTH)

    assert shown(whole) == shown(streamed) == [("", *(expected or (text, "", "stop")))]
    assert whole["usage"] == streamed["usage"]
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    is_limited = "thinking_token_budget" in fields or fields == FORCED
    assert (dispatcher.requests[0].params.thinking is not None) == is_limited


async def test_reasoning_of_earlier_turns_reaches_the_template(serve: Any, folder: Path) -> None:
    template = "{% for one in messages %}{{ one.reasoning_content | default('') }};{% endfor %}"
    for name in ("reasoning", "reasoning_content"):
        messages = [{"role": "assistant", "content": "a", name: "Hm."}, USER]
        _, _, dispatcher = await ask(serve, folder, "b", {"messages": messages, "chat_template": template})

        tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        assert tokenizer.decode(dispatcher.requests[0].prompts[0]) == "Hm.;;"
