"""Forced tool calls over a scripted dispatcher: whole and streamed, their ids, and how they finish."""

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from scheduler.api.tool_calls import call_options
from scheduler.request import GenerationRequest
from scheduler.tools.choice import ChoiceMode, ToolChoice
from scheduler.tools.forced import forced_schema
from testing.scheduler.scripted_dispatcher import Line, Script
from tests.scheduler.test_chat import events
from tests.scheduler.test_tool_history import SCHEMA, TOOL, USER, WEATHER
from wire.errors import InvalidGrammar

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_renderer")]

ARGUMENTS = '{"city": "Paris"}'
ONE = f'[{{"name": "weather", "parameters": {ARGUMENTS}}}]'
TWO = f'[{{"name": "weather", "parameters": {ARGUMENTS}}}, {{"name": "now", "parameters": {{}}}}]'
NOW = {"type": "function", "function": {"name": "now"}}
REQUIRED = {"tools": [TOOL, NOW], "tool_choice": "required"}
NAMED = {"tools": [NOW, TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
LEGACY = {"functions": [WEATHER], "function_call": {"name": "weather"}}


def ended(text: str, served: list[Any]) -> Script:
    """Return a script of `text` and the model's end token; `served` gets the server."""

    def script(request: GenerationRequest, prompt: int, sequence: int) -> Line:
        end = served[0].context.tokens.eos_token_ids[0]
        return Line((*served[0].ids(text), end), stop_token_id=end)

    return script


async def answers(
    serve: Any, text: str, fields: dict[str, Any], *, cut: int = 0, headers: Any = None, **options: Any
) -> tuple[list[Any], list[Any], Any]:
    """Return the choices of the answer as a whole, those joined from a stream, and the request."""
    got: list[Any] = []
    script = ended(text, got)
    if cut:
        script = lambda request, prompt, sequence: Line(got[0].ids(text)[:cut])  # noqa: E731
    async with serve(script, **options) as served:
        got.append(served)
        body = {"messages": [USER], "temperature": 1} | fields
        whole = await served.client.post("/v1/chat/completions", json=body, headers=headers)
        assert whole.status_code == 200, whole.text
        stream = await served.client.post("/v1/chat/completions", json=body | {"stream": True}, headers=headers)
        return whole.json()["choices"], stream_choices(stream.text), served.dispatcher.requests[0]


def stream_choices(text: str) -> list[Any]:
    """Return the choices that a stream's deltas join to, in the form of a whole answer."""
    found: dict[int, Any] = {}
    for chunk in events(text)[:-1]:
        (part,) = chunk["choices"]
        choice = found.setdefault(part["index"], {"message": {"content": ""}, "finish_reason": None})
        message, delta = choice["message"], part["delta"]
        assert choice["finish_reason"] is None
        choice["finish_reason"] = part["finish_reason"]
        message["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append({"id": call["id"], "type": call["type"], "function": call["function"]})
            else:
                assert (set(call), set(call["function"])) == ({"index", "function"}, {"arguments"})
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        if "function_call" in delta:
            known = message.setdefault("function_call", {"arguments": ""})
            known |= delta["function_call"] | {"arguments": known["arguments"] + delta["function_call"]["arguments"]}
    return [found[index] for index in sorted(found)]


def shown(choices: list[Any]) -> list[Any]:
    """Return what answers and streams have in common: content, calls without ids, finish reason."""
    return [
        (
            one["message"]["content"] or "",
            [call["function"] for call in one["message"].get("tool_calls", ())],
            one["message"].get("function_call"),
            one["finish_reason"],
        )
        for one in choices
    ]


PARIS = {"name": "weather", "arguments": ARGUMENTS}


@pytest.mark.covers("B.tools.11", "B.tools.14", "B.tools.15")
@pytest.mark.parametrize(
    ("text", "fields", "cut", "expected"),
    [
        (ONE, REQUIRED, 0, ("", [PARIS], None, "tool_calls")),
        (TWO, REQUIRED, 0, ("", [PARIS, {"name": "now", "arguments": "{}"}], None, "tool_calls")),
        (TWO, REQUIRED | {"parallel_tool_calls": False}, 0, ("", [PARIS], None, "tool_calls")),
        (ARGUMENTS, NAMED, 0, ("", [PARIS], None, "stop")),
        (ARGUMENTS, LEGACY, 0, ("", [], PARIS, "stop")),
        (ONE, REQUIRED | {"stop": ["Paris", "name"]}, 0, ("", [PARIS], None, "tool_calls")),
        (ARGUMENTS, NAMED | {"stop": "Paris", "min_tokens": 1}, 0, ("", [PARIS], None, "stop")),
        (ONE, REQUIRED | {"response_format": {"type": "json_object"}}, 0, ("", [PARIS], None, "tool_calls")),
        (ONE, REQUIRED | {"logprobs": True, "return_token_ids": True}, 0, ("", [PARIS], None, "tool_calls")),
        (ONE, REQUIRED, 4, ("", [], None, "length")),
        ("I will not.", REQUIRED, 0, ("I will not.", [], None, "stop")),
        ('{"error": "no"}', REQUIRED, 0, ('{"error": "no"}', [], None, "stop")),
        ('[{"error": "no"}, ', REQUIRED, 0, ('[{"error": "no"}, ', [], None, "stop")),
        ("I will not. Never.", REQUIRED | {"stop": "not"}, 0, ("I will ", [], None, "stop")),
        (TWO[:-22], REQUIRED, 0, ("", [PARIS], None, "tool_calls")),
    ],
)
async def test_a_forced_answer_is_its_calls(
    serve: Any, text: str, fields: Any, cut: int, expected: tuple[Any, ...]
) -> None:
    whole, streamed, _ = await answers(serve, text, fields, cut=cut)

    assert shown(whole) == shown(streamed) == [expected]


async def test_a_call_cut_by_length_has_the_partial_arguments(serve: Any) -> None:
    for cut in range(1, 60):
        whole, streamed, _ = await answers(serve, ONE, REQUIRED, cut=cut)

        assert shown(whole) == shown(streamed)
        assert whole[0]["finish_reason"] == "length"
        for call in whole[0]["message"].get("tool_calls", ()):
            assert ARGUMENTS.startswith(call["function"]["arguments"])
        if whole[0]["message"].get("tool_calls") and call["function"]["arguments"] == ARGUMENTS:
            return
    pytest.fail("no cut has the call")


AUTO = {"tools": [TOOL, NOW]}
CALLED = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
CUT = 'Sure. <tool_call>{"name": "weather", "arguments": {"city": "Par'


@pytest.mark.parametrize(
    ("text", "fields", "cut", "expected"),
    [
        ("Hello there", AUTO, 0, ("Hello there", [], None, "stop")),
        (CALLED, AUTO, 0, ("", [PARIS], None, "tool_calls")),
        ("Let me look.\n" + CALLED, AUTO, 0, ("Let me look.\n", [PARIS], None, "tool_calls")),
        (f"{CALLED}\n{CALLED}", AUTO, 0, ("", [PARIS, PARIS], None, "tool_calls")),
        (f"{CALLED}\n{CALLED}", AUTO | {"parallel_tool_calls": False}, 0, ("", [PARIS], None, "tool_calls")),
        (CALLED, {"functions": [WEATHER]}, 0, ("", [], PARIS, "function_call")),
        (CALLED, AUTO | {"tool_choice": "none"}, 0, (CALLED, [], None, "stop")),
        (ONE, REQUIRED, 0, ("", [PARIS], None, "tool_calls")),
        ("a Paris " + CALLED, AUTO | {"stop": "Paris"}, 0, ("a ", [], None, "stop")),
        ("a " + CALLED, AUTO | {"stop": ["Paris", "tool"]}, 0, ("a ", [PARIS], None, "tool_calls")),
        ("a Pari" + CALLED, AUTO | {"stop": "Paris"}, 0, ("a Pari", [PARIS], None, "tool_calls")),
        ("Paris b" + CALLED, AUTO | {"stop": "Paris", "min_tokens": 99}, 0, ("Paris b", [PARIS], None, "tool_calls")),
        (CALLED + " User: " + CALLED, AUTO | {"stop": ["User:"]}, 0, ("", [PARIS], None, "tool_calls")),
        (CALLED + "\nObservation: warm", AUTO | {"stop": "vation"}, 999, ("", [PARIS], None, "tool_calls")),
        (f"{CALLED} Us{CALLED}er: {CALLED}", AUTO | {"stop": "User:"}, 0, ("", [PARIS] * 3, None, "tool_calls")),
        ("<tool_call>no</tool_call>", AUTO, 0, ("<tool_call>no</tool_call>", [], None, "stop")),
        ("x <tool_", AUTO, 0, ("x <tool_", [], None, "stop")),
        (CUT, AUTO, 999, ("Sure. ", [PARIS | {"arguments": '{"city": "Par'}], None, "length")),
    ],
)  # fmt: skip
async def test_auto_finds_the_calls_in_the_text(
    serve: Any, text: str, fields: Any, cut: int, expected: tuple[Any, ...]
) -> None:
    for asked in ({}, {"logprobs": True, "return_token_ids": True}):
        whole, streamed, _ = await answers(serve, text, fields | asked, cut=cut, tool_call_parser="hermes")

        assert shown(whole) == shown(streamed) == [expected]
        if expected[1]:
            assert whole[0]["message"]["content"] in (expected[0] or None, "")


@pytest.mark.covers("B.tools.12")
async def test_markers_that_are_special_tokens_are_parsed(serve: Any, make_model: Any) -> None:
    folder = make_model()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<tool_call>", "</tool_call>", "<x>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    whole, streamed, _ = await answers(serve, "a<x>" + CALLED, AUTO, folder=folder, tool_call_parser="hermes")
    plain, _, _ = await answers(serve, "a<x>" + CALLED, {}, folder=folder, tool_call_parser="hermes")

    assert shown(whole) == shown(streamed) == [("a", [PARIS], None, "tool_calls")]
    assert "<tool_call>" not in plain[0]["message"]["content"]


async def test_ids_depend_on_request_choice_and_call(serve: Any) -> None:
    mine = {"x-request-id": "mine"}
    first, streamed, _ = await answers(serve, TWO, REQUIRED | {"n": 3}, headers=mine)
    again, _, _ = await answers(serve, TWO, REQUIRED | {"n": 3}, headers=mine)
    later, _, _ = await answers(serve, TWO, REQUIRED | {"n": 3, "messages": [USER, USER]}, headers=mine)
    other, _, _ = await answers(serve, TWO, REQUIRED | {"n": 3})

    sets = [[call["id"] for one in choices for call in one["message"]["tool_calls"]] for choices in (first, again)]
    assert sets[0] == sets[1] == [call["id"] for one in streamed for call in one["message"]["tool_calls"]]
    assert len(set(sets[0])) == 6
    assert all(call_id.startswith("call_") for call_id in sets[0])
    for choices in (later, other):
        assert not set(sets[0]) & {call["id"] for one in choices for call in one["message"]["tool_calls"]}


class UnreadPrompt(tuple[int, ...]):
    """A prompt that fails if it is formatted, as 8,000 ids take longer than the rest of a request."""

    __slots__ = ()

    def __repr__(self) -> str:
        raise AssertionError("a prompt is formatted")


async def test_ids_of_calls_do_not_format_the_prompt() -> None:
    prompt = UnreadPrompt(range(3))

    assert call_options(ToolChoice(ChoiceMode.NONE), "hermes", "id", prompt) is None
    auto = call_options(ToolChoice(ChoiceMode.AUTO), "hermes", "id", prompt)
    assert auto is not None
    assert len(auto.origin) == 32


@pytest.mark.covers("B.tools.11")
async def test_the_grammar_is_the_schema_of_the_tools(serve: Any) -> None:
    _, _, required = await answers(serve, ONE, REQUIRED)
    _, _, named = await answers(serve, ARGUMENTS, NAMED)

    assert json.loads(named.params.structured.value) == SCHEMA | {"additionalProperties": False}
    schema = json.loads(required.params.structured.value)
    assert schema["minItems"] == 1
    assert "maxItems" not in schema
    assert [one["properties"]["name"]["enum"] for one in schema["items"]["anyOf"]] == [["weather"], ["now"]]
    assert all(one["additionalProperties"] is False for one in schema["items"]["anyOf"])
    _, _, alone = await answers(serve, ONE, REQUIRED | {"parallel_tool_calls": False})
    assert json.loads(alone.params.structured.value) == schema | {"maxItems": 1}


@pytest.mark.parametrize(
    ("parameters", "closed"),
    [
        ({"properties": {"a": {}}, "required": ["a"]}, True),
        ({"properties": {"a": {}}, "required": ["a", "b"]}, False),
        ({"properties": None}, False),
        ({"properties": {"a": {}}, "required": True}, False),
        ({"properties": {"a": {}}, "required": [{}]}, False),
        ({"required": ["b"]}, False),
    ],
)
async def test_a_schema_is_closed_if_it_names_what_it_requires(parameters: Any, closed: bool) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    schema = forced_schema(ToolChoice(ChoiceMode.NAMED, (tool,)))

    assert ("additionalProperties" in schema) == closed


async def test_references_move_with_the_schema_of_their_tool() -> None:
    parts: dict[str, Any] = {
        "z": {"properties": {"b": {"$ref": "#/components/w~1%C3%A9"}, "c": {"$ref": "#/components/l/0"}}},
        "w/é": {"items": {"$ref": "#/components/z"}},
        "l": [{"$ref": "#"}, {"$ref": "#/components/other"}],
        "other": {"enum": [{"$ref": "#"}]},
    }
    schema = {"type": "object", "properties": {"a": {"$ref": "#/components/z"}}, "components": parts}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    moved = forced_schema(ToolChoice(ChoiceMode.REQUIRED, (tool,)))["$defs"]["f"]

    assert moved["properties"]["a"]["$ref"] == "#/$defs/f/components/z"
    assert moved["components"]["z"]["properties"]["b"]["$ref"] == "#/$defs/f/components/w~1%C3%A9"
    assert moved["components"]["w/é"]["items"]["$ref"] == "#/$defs/f/components/z"
    assert moved["components"]["l"] == [{"$ref": "#/$defs/f"}, {"$ref": "#/components/other"}]
    assert moved["components"]["other"] == parts["other"]


PATH, LEGACY_PATH = "tools.{}.function.parameters", "functions.0.parameters"
RESPONSE = {"input": "hi", "tools": [{"type": "function", "name": "now"}, {"type": "function", **WEATHER}]}
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
MESSAGE = {"messages": [USER], "max_tokens": 9, "tools": [{"name": "now", "input_schema": {"type": "object"}}]}


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/v1/chat/completions", {"messages": [USER]} | NAMED, PATH.format(1)),
        ("/v1/chat/completions", {"messages": [USER]} | REQUIRED, "tools"),
        ("/v1/chat/completions", {"messages": [USER]} | REQUIRED | {"tools": [TOOL]}, PATH.format(0)),
        ("/v1/chat/completions", {"messages": [USER]} | LEGACY, LEGACY_PATH),
        ("/v1/responses", RESPONSE | {"tool_choice": "required"}, "tools"),
        ("/v1/responses", RESPONSE | {"tool_choice": {"type": "function", "name": "weather"}}, "tools.1.parameters"),
        ("/v1/responses", RESPONSE | {"tool_choice": ALLOWED}, "tools.1.parameters"),
        ("/v1/messages", MESSAGE | {"tool_choice": {"type": "any"}}, "tools.0.input_schema"),
        ("/v1/messages", MESSAGE | {"tool_choice": {"type": "tool", "name": "now"}}, "tools.0.input_schema"),
    ],
)
async def test_a_grammar_that_cannot_be_made_names_its_schema(
    serve: Any, path: str, fields: dict[str, Any], named: str
) -> None:
    async with serve() as served:
        served.dispatcher.refuse_with = InvalidGrammar("unclosed group")
        answer = await served.client.post(path, json=fields)

        error = answer.json()["error"]
        assert answer.status_code == 400
        assert error.get("param", error["message"].partition(": ")[0]) == named


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (REQUIRED | {"guided_choice": ["a"]}, "tool_choice"),
        (REQUIRED | {"structured_outputs": {"regex": "a"}}, "tool_choice"),
        (NAMED | {"use_beam_search": True, "n": 2, "temperature": 0}, "use_beam_search"),
        ({"tools": [TOOL]}, "tool_choice"),
        ({"functions": [WEATHER]}, "function_call"),
    ],
)
async def test_what_excludes_forced_calls_is_refused(serve: Any, fields: Any, param: str) -> None:
    async with serve() as served:
        answer = await served.client.post("/v1/chat/completions", json={"messages": [USER]} | fields)

        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
