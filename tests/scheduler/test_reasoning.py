"""Chats of reasoning models over a scripted dispatcher: thinking, content, calls and counts, whole and streamed."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from scheduler.request import GenerationRequest
from testing.scheduler.scripted_dispatcher import Line, Script
from tests.scheduler.conftest import CHATML, write_model
from tests.scheduler.test_chat import events
from tests.scheduler.test_tool_history import TOOL, USER

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_renderer")]

PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
SPECIAL = ("[THINK]", "[/THINK]", "<x>", *HARMONY)
NAMES = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"
ASKS = NAMES + "{% if add_generation_prompt %}assistant:{% endif %}"
"""Templates without special tokens, in which a turn begins with its role's name."""
OPEN, CLOSED = CHATML + "{{ '<think>\n' }}", CHATML + "{{ '<think>\n\n</think>\n\n' }}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has the markers of thinking, those of Mistral as special tokens."""
    made = write_model(tmp_path_factory.mktemp("reasoning-model"))
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, special=False) for text in PLAIN])
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(made / "tokenizer.json"))
    return made


def script_of(text: str, served: list[Any], cut: int = 0) -> Script:
    """Return a script of `text` and the end token, or of its first `cut` tokens; `served` gets the server."""

    def script(request: GenerationRequest, prompt: int, sequence: int) -> Line:
        end = served[0].context.tokens.eos_token_ids[0]
        ids = served[0].ids(text)
        return Line(ids[:cut]) if cut else Line((*ids, end), stop_token_id=end)

    return script


async def ask(
    serve: Any, folder: Path, text: str, fields: dict[str, Any], *, parser: str | None = "qwen3", cut: int = 0,
    **options: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Return the whole answer, the choices that a stream joins to with its last usage, and the dispatcher."""
    got: list[Any] = []
    async with serve(script_of(text, got, cut), folder=folder, reasoning_parser=parser, **options) as served:
        got.append(served)
        body = {"messages": [USER], "temperature": 1} | fields
        whole = await served.client.post("/v1/chat/completions", json=body)
        assert whole.status_code == 200, whole.text
        asked = body | {"stream": True, "stream_options": {"include_usage": True}}
        stream = await served.client.post("/v1/chat/completions", json=asked)
        return whole.json(), joined(events(stream.text)[:-1]), served.dispatcher


def joined(chunks: list[Any]) -> dict[str, Any]:
    """Return what a stream's chunks join to, in the form of a whole answer."""
    choices: dict[int, Any] = {}
    usage = chunks.pop()["usage"]
    for chunk in chunks:
        (part,) = chunk["choices"]
        message = {"content": "", "reasoning": "", "reasoning_content": "", "calls": ""}
        choice = choices.setdefault(part["index"], {"message": message, "tokens": []})
        delta, message = part["delta"], choice["message"]
        if delta.get("reasoning"):
            assert message["content"] in ("", USER["content"]), "the thinking comes first"
        for name in ("reasoning", "reasoning_content", "content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            message["calls"] += call["function"].get("name", "") + call["function"]["arguments"]
        choice["tokens"] += [one["token"] for one in (part["logprobs"] or {}).get("content", ())]
        choice["finish_reason"] = part["finish_reason"]
    return {"choices": [choices[at] for at in sorted(choices)], "usage": usage}


def shown(answer: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return thinking, content, calls and finish reason of each choice."""
    found = []
    for choice in answer["choices"]:
        message = choice["message"]
        assert (message["reasoning"] or "") == (message.get("reasoning_content") or "")
        calls = [one["function"] for one in message.get("tool_calls", ())]
        called = message.get("calls") or "".join(one["name"] + one["arguments"] for one in calls)
        found.append((message["reasoning"] or "", message["content"] or "", called, choice["finish_reason"]))
    return found


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "a</think>b"}}\n</tool_call>'
WRITTEN = CALL.replace("</think>", "")
"""As content, where a second end of the thinking is left out."""
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
WEATHER = 'commentary to=functions.weather <|constrain|>json<|message|>{"city": "a</think>b"}<|call|>'
OPENAI = {"tool_call_parser": "openai"}
CALLED = 'weather{"city": "a</think>b"}'
TOOLS = {"tools": [TOOL]}
FORM = {"response_format": {"type": "json_object"}}
BOTH: dict[str, Any] = {"tool_call_parser": "hermes"}


def said(text: str) -> dict[str, Any]:
    """Return the fields of a chat in which the user says `text`."""
    return {"messages": [{"role": "user", "content": text}]}


def prefilled(text: str) -> dict[str, Any]:
    """Return the fields of a chat whose answer begins with `text`."""
    messages = [{"role": "user", "content": "[THINK]?"}, {"role": "assistant", "content": text}]
    return {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}


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


FORCED = {"tools": [TOOL], "tool_choice": "required"}


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
async def test_a_form_follows_the_thinking(
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
