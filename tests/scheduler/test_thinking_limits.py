"""The limits of thinking that the engine gets: budgets, and forms and calls that begin after it."""

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
    ask,
    prefilled,
    said,
    shown,
    write_reasoning_model,
)
from tests.scheduler.test_tool_history import USER

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_renderer")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with markers of thinking."""
    return write_reasoning_model(tmp_path_factory.mktemp("reasoning-model"))


def ids_of(folder: Path, *texts: str) -> list[int]:
    """Return the ids of tokens."""
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    return [tokenizer.token_to_id(text) or 0 for text in texts]


THINKS, OFF = ("<think>", "</think>"), {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.mark.parametrize(
    ("parser", "fields", "options", "expected"),
    [
        ("qwen3", {}, {}, None),
        ("qwen3", {"thinking_token_budget": -1}, {}, None),
        ("qwen3", {"thinking_token_budget": 0}, {}, (THINKS, True, 0, 0)),
        ("qwen3", {"thinking_token_budget": 9}, {"chat_template": OPEN}, (THINKS, True, 1, 9)),
        ("qwen3", {"thinking_token_budget": 9}, {"chat_template": CLOSED}, (THINKS, False, 0, 9)),
        ("qwen3", {"thinking_token_budget": 9, **OFF}, {}, (THINKS, False, 0, 9)),
        ("qwen3", FORM, {}, (THINKS, True, 0, None)),
        ("qwen3", FORM | OFF, {}, None),
        ("qwen3", FORCED | {"thinking_token_budget": 5}, {}, (THINKS, True, 0, 5)),
        ("deepseek_r1", FORM, {"chat_template": CLOSED}, None),
        ("deepseek_r1", FORM, {"chat_template": OPEN}, (THINKS, True, 1, None)),
        ("deepseek_r1", FORM | prefilled("Well"), {}, None),
        ("deepseek_r1", FORM | prefilled("<think>a"), {"chat_template": NAMES}, (THINKS, True, 1, None)),
        ("mistral", FORM | said("[THINK]?"), {"chat_template": ASKS}, (("[THINK]", "[/THINK]"), False, 0, None)),
        ("mistral", FORM, {}, (("[THINK]", "[/THINK]"), False, 0, None)),
        ("granite", FORM, {}, None),
    ],
)
async def test_the_engine_gets_what_limits_the_thinking(
    serve: Any, folder: Path, parser: str, fields: Any, options: Any, expected: Any
) -> None:
    _, _, dispatcher = await ask(serve, folder, "{}", fields, parser=parser, **options)

    thinking = dispatcher.requests[0].params.thinking
    if expected is None:
        assert thinking is None
        return
    markers, is_open, num_before, budget = expected
    assert [thinking.start_token_id, thinking.end_token_id] == ids_of(folder, *markers)
    assert (thinking.is_open, thinking.num_before, thinking.budget) == (is_open, num_before, budget)


@pytest.mark.covers("B.reasoning.5")
@pytest.mark.parametrize(
    ("parser", "fields", "text", "expected"),
    [
        ("qwen3", FORM, 'Hm.</think>{"a": "</think>"}', ("Hm.", '{"a": "</think>"}', "")),
        ("qwen3", FORM | OFF, '{"a": "<think></think>"}', ("", '{"a": "<think></think>"}', "")),
        ("glm45", FORM, 'Hm.</think>{"a": "<think>b</think>"}', ("Hm.", '{"a": "<think>b</think>"}', "")),
        ("mistral", FORM, '{"a": "[THINK]b"}', ("", '{"a": "[THINK]b"}', "")),
        ("mistral", FORM, '[THINK]Hm.[/THINK]{"a": "[THINK]b"}', ("Hm.", '{"a": "[THINK]b"}', "")),
        ("granite", FORM, '{"a": 1}', ("", '{"a": 1}', "")),
        ("qwen3", FORCED, '<tool_call>?</think>[{"name": "weather", "parameters": {"city": "a</think>"}}]',
         ("<tool_call>?", "", 'weather{"city": "a</think>"}')),
    ],
)  # fmt: skip
async def test_structured_output_follows_the_thinking(
    serve: Any, folder: Path, parser: str, fields: Any, text: str, expected: tuple[str, str, str]
) -> None:
    whole, streamed, _ = await ask(serve, folder, text, fields, parser=parser)

    assert shown(whole) == shown(streamed) == [(*expected, "tool_calls" if expected[2] else "stop")]


BUDGET = {"thinking_token_budget": 3}


@pytest.mark.parametrize(
    ("parser", "fields", "param"),
    [
        (None, BUDGET, "thinking_token_budget"),
        ("openai_gptoss", BUDGET, "thinking_token_budget"),
        ("granite", BUDGET, "thinking_token_budget"),
        ("qwen3", {"thinking_token_budget": -2}, "thinking_token_budget"),
        ("qwen3", {"thinking_token_budget": 1.5}, "thinking_token_budget"),
        ("qwen3", BUDGET | {"use_beam_search": True, "n": 2, "temperature": 0}, "use_beam_search"),
        ("qwen3", BUDGET | {"allowed_token_ids": [5]}, "allowed_token_ids"),
        ("qwen3", BUDGET | {"bad_words": ["</think>"]}, "bad_words"),
        ("qwen3", BUDGET | {"bad_words": ["a</think>"]}, "bad_words"),
        ("qwen3", FORM | {"bad_words": ["</think>"]}, "bad_words"),
        ("qwen3", BUDGET | {"stop_token_ids": ["</think>"], "min_tokens": 5}, "stop_token_ids"),
    ],
)
async def test_a_budget_that_cannot_be_kept_is_refused(
    serve: Any, folder: Path, parser: str | None, fields: Any, param: str
) -> None:
    if "stop_token_ids" in fields:
        fields = fields | {"stop_token_ids": ids_of(folder, *fields["stop_token_ids"])}
    async with serve(folder=folder, reasoning_parser=parser) as served:
        answer = await served.client.post("/v1/chat/completions", json={"messages": [USER], "temperature": 1} | fields)

        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize(
    ("prompt", "fields", "expected"),
    [
        ("<think>a", FORM, (True, None)),
        ("a", FORM, None),
        ("<think>a</think>", FORM, None),
        ("<think>cut<|end|>the next turn", FORM, None),
        ("a", BUDGET, (False, 3)),
        (["<think>a", "b<think>c"], BUDGET, (True, 3)),
        (["<think>a", "b"], BUDGET, "prompt"),
    ],
)
async def test_prompts_of_completions_think_if_they_end_so(
    serve: Any, folder: Path, prompt: Any, fields: Any, expected: Any
) -> None:
    async with serve("b</think>c", folder=folder, reasoning_parser="qwen3") as served:
        body = {"prompt": prompt, "temperature": 1} | fields
        answer = await served.client.post("/v1/completions", json=body)

        if isinstance(expected, str):
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, expected)
            return
        assert answer.json()["choices"][0]["text"] == "b</think>c"
        thinking = served.dispatcher.requests[0].params.thinking
        assert (thinking and (thinking.is_open, thinking.budget)) == expected
