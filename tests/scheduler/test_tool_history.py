"""Tools, calls and their results in a conversation, as chat templates get them; and what is refused."""

import json
from typing import Any

import pytest

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_renderer")]

SHOWS = "{{ messages | tojson }}|{{ tools | tojson }}"
LOOPS = "{% for m in messages %}{% for part in m.content %}{{ part }}{% endfor %}{% endfor %}" + SHOWS
USER = {"role": "user", "content": "Weather in Paris?"}
TREE = {"properties": {"l": {"$ref": "#"}, "r": {"$ref": "#/properties/l"}}, "required": None}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Look it up", "parameters": SCHEMA}
TOOL = {"type": "function", "function": WEATHER}
CALLED = {"name": "weather", "arguments": '{"city": "Paris"}'}
CALL = {"id": "call_1", "type": "function", "function": CALLED}
READ = {"name": "weather", "arguments": {"city": "Paris"}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
LONG = 123456789012345678901234
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees"}


def call(arguments: Any) -> dict[str, Any]:
    """Return an assistant's message with one call."""
    return CALLS | {"tool_calls": [CALL | {"function": {"name": "weather", "arguments": arguments}}]}


def read(content: Any = "", **call_fields: Any) -> dict[str, Any]:
    """Return the message that a template gets for CALLS."""
    one = {"id": "call_1", "type": "function", "function": READ} | call_fields
    return {"role": "assistant", "content": content, "tool_calls": [one]}


def tools_read(**fields: Any) -> list[dict[str, Any]]:
    """Return the tools that a template gets, with these fields of the function."""
    return [{"type": "function", "function": {"name": "f", "description": None, "parameters": None} | fields}]


async def rendered(served: Any, body: dict[str, Any]) -> tuple[Any, Any]:
    """Return the messages and tools that the template of `served` gets, by /tokenize and by a chat alike."""
    tokenized = await served.client.post("/tokenize", json=body)
    assert tokenized.status_code == 200, tokenized.text
    none = {"function_call" if "functions" in body else "tool_choice": "none", "max_tokens": 1}
    chat = await served.client.post("/v1/chat/completions", json=body | none)
    assert chat.status_code == 200, chat.text
    ids = tokenized.json()["tokens"]
    assert list(served.dispatcher.requests[-1].prompts[0]) == ids
    text = (await served.client.post("/detokenize", json={"tokens": ids})).json()["prompt"]
    messages, tools = text.partition('[{"role"')[1:]
    messages, _, tools = (messages + tools).rpartition("|")
    return json.loads(messages), json.loads(tools)


@pytest.mark.covers("B.tools.1")
@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([CALLS, RESULT], [read(), RESULT]),
        ([CALLS | {"content": "Let me look."}, RESULT], [read("Let me look."), RESULT]),
        ([{"role": "assistant", "content": "Hi", "tool_calls": []}], [{"role": "assistant", "content": "Hi"}]),
        ([call("")], [read(function=READ | {"arguments": {}})]),
        ([call(None)], [read(function=READ | {"arguments": {}})]),
        ([call({"city": "Paris"})], [read()]),
        ([call("[1]")], [read(function=READ | {"arguments": {}})]),
        ([call('{"city": ')], [read(function=READ | {"arguments": {}})]),
        ([call("[" * 5000)], [read(function=READ | {"arguments": {}})]),
        ([call('{"a": ' + "[" * 260 + "]" * 260 + "}")], [read(function=READ | {"arguments": {}})]),
        ([call('{"a": ' + "[" * 980 + "]" * 980 + "}")], [read(function=READ | {"arguments": {}})]),
        ([call('{"a": "\\ud800"}')], [read(function=READ | {"arguments": {}})]),
        ([call('{"a": NaN}')], [read(function=READ | {"arguments": {}})]),
        ([call('{"city": 123456789012345678901234}')], [read(function=READ | {"arguments": {"city": LONG}})]),
        (
            [CALLS, RESULT | {"content": [{"type": "text", "text": "18"}, {"type": "text", "text": "degrees"}]}],
            [read(), RESULT | {"content": "18\ndegrees"}],
        ),
        ([CALLS, RESULT | {"content": []}], [read(), RESULT | {"content": ""}]),
        ([CALLS, RESULT, RESULT | {"content": "again"}], [read(), RESULT, RESULT | {"content": "again"}]),
        ([CALLS, {"role": "tool", "content": "18"}], [read(), {"role": "tool", "content": "18"}]),
        (
            [CALLS | {"tool_calls": [{"function": CALLED}]}, RESULT],
            [read() | {"tool_calls": [{"type": "function", "function": READ}]}, RESULT],
        ),
        (
            [{"role": "assistant", "content": None, "function_call": CALLED},
             {"role": "function", "name": "weather", "content": "18"}],
            [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": READ}]},
             {"role": "tool", "content": "18", "name": "weather"}],
        ),
    ],
)  # fmt: skip
async def test_calls_and_results_reach_the_template(
    serve: Any, make_model: Any, messages: list[Any], expected: list[Any]
) -> None:
    async with serve(folder=make_model(chat_template=SHOWS)) as served:
        assert await rendered(served, {"messages": [USER, *messages]}) == ([USER, *expected], None)


async def test_results_stay_texts_for_a_template_of_parts(serve: Any, make_model: Any) -> None:
    async with serve(folder=make_model(chat_template=LOOPS)) as served:
        messages, _ = await rendered(served, {"messages": [USER, CALLS, RESULT]})

    assert [message["content"] for message in messages[1:]] == [[], "18 degrees"]


@pytest.mark.covers("B.tools.1")
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tools": [TOOL]}, [TOOL]),
        ({"functions": [WEATHER]}, [TOOL]),
        ({"tools": [{"function": {"name": "f"}}]}, tools_read()),
        ({"tools": [{"type": "function", "extra": 1, "function": {"name": "f", "x": 1}}]}, tools_read()),
        ({"tools": [{"function": {"name": "f", "strict": True, "parameters": {}}}]},
         tools_read(parameters={}, strict=True)),
        ({"tools": [{"function": {"name": "f", "parameters": TREE}}]}, tools_read(parameters=TREE)),
        ({"tools": None}, None),
    ],
)  # fmt: skip
async def test_tools_reach_the_template_as_vllm_passes_them(
    serve: Any, make_model: Any, fields: dict[str, Any], expected: Any
) -> None:
    async with serve(folder=make_model(chat_template=SHOWS)) as served:
        assert await rendered(served, {"messages": [USER]} | fields) == ([USER], expected)


def allowing(*names: str, mode: str = "auto") -> dict[str, Any]:
    """Return a `tool_choice` of the functions with these names."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}}


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_tools_that_are_not_allowed_are_left_out(serve: Any, make_model: Any, mode: str) -> None:
    """Neither the template nor the grammar has them."""
    tools = {"tools": [TOOL, *tools_read()]}
    async with serve(folder=make_model(chat_template=SHOWS), tool_call_parser="hermes") as served:
        for fields in (tools | allowing("f", mode=mode), {"tools": tools_read(), "tool_choice": mode}):
            answer = await served.client.post("/v1/chat/completions", json={"messages": [USER]} | fields)
            assert answer.status_code == 200, answer.text

        one, other = served.dispatcher.requests
        assert one.prompts == other.prompts
        assert one.params.structured == other.params.structured
        assert (one.params.structured is None) is (mode == "auto")


def function(**fields: Any) -> dict[str, Any]:
    """Return a body with one tool, with these fields of its function."""
    return {"tools": [{"type": "function", "function": {"name": "f"} | fields}]}


def parameters(**schema: Any) -> dict[str, Any]:
    """Return a body with one tool of these parameters."""
    return function(parameters={"type": "object"} | schema)


NAME = "tools.0.function.name"
PARAMETERS = "tools.0.function.parameters"
BAD_TOOLS: list[tuple[dict[str, Any], str]] = [
    ({"tools": []}, "tools"),
    ({"tools": {}}, "tools"),
    ({"tools": ["f"]}, "tools.0"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [TOOL, TOOL]}, "tools.1.function.name"),
    ({"tools": [{"function": {"name": f"f{at}"}} for at in range(1000)]}, "tools"),
    ({"functions": [WEATHER, {"name": "a b"}]}, "functions.1.name"),
    ({"functions": [WEATHER], "tools": [TOOL]}, "functions"),
    (function(name="f" * 65), NAME),
    (function(name="a.b"), NAME),
    (function(name=""), NAME),
    (function(name="f\n"), NAME),
    (function(name=3), NAME),
    (function(description=3), "tools.0.function.description"),
    (function(strict="yes"), "tools.0.function.strict"),
    (function(parameters=""), PARAMETERS),
    (function(parameters=3), PARAMETERS),
    (function(parameters={"type": "nope"}), f"{PARAMETERS}.type"),
    (function(parameters={"type": "array"}), f"{PARAMETERS}.type"),
    (parameters(properties={"a": {"type": "nope"}}), f"{PARAMETERS}.properties.a.type"),
    (parameters(properties={"a": {"anyOf": [{"type": []}]}}), f"{PARAMETERS}.properties.a.anyOf.0.type"),
    (parameters(items={"$ref": "http://x"}), f"{PARAMETERS}.items.$ref"),
    (parameters(**{"$defs": {"a": {"$ref": 3}}}), f"{PARAMETERS}.$defs.a.$ref"),
    (parameters(properties={"a": {"$ref": None}}), f"{PARAMETERS}.properties.a.$ref"),
    (parameters(items={"$ref": "#anchor"}), f"{PARAMETERS}.items.$ref"),
    (parameters(items={"$ref": "#/x/y"}, x={"y": {"$ref": "#a"}}), f"{PARAMETERS}.x.y.$ref"),
    (parameters(items={"$ref": "#/$defs/none"}), f"{PARAMETERS}.items.$ref"),
    (function(parameters={"$ref": "#"}), f"{PARAMETERS}.$ref"),
    (parameters(properties={"a": {"$ref": "#/properties/a"}}), f"{PARAMETERS}.properties.a.$ref"),
    (parameters(**{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}), f"{PARAMETERS}.$defs.a.$ref"),
    (parameters(properties=[]), f"{PARAMETERS}.properties"),
    (parameters(properties={"a": 1}), f"{PARAMETERS}.properties.a"),
    (parameters(properties={"a": {"items": "string"}}), f"{PARAMETERS}.properties.a.items"),
    (parameters(properties={"a": {"anyOf": {"type": "string"}}}), f"{PARAMETERS}.properties.a.anyOf"),
    (parameters(properties={"a": {"oneOf": [{}, 3]}}), f"{PARAMETERS}.properties.a.oneOf.1"),
    (parameters(properties={"a": {"enum": "b"}}), f"{PARAMETERS}.properties.a.enum"),
    (parameters(properties={"a": {"pattern": 3}}), f"{PARAMETERS}.properties.a.pattern"),
    (parameters(required="a"), f"{PARAMETERS}.required"),
    (parameters(required=["a", 3]), f"{PARAMETERS}.required"),
]
BAD_MESSAGES: list[tuple[list[Any], str]] = [
    ([RESULT], "messages.1.role"),
    ([CALLS, USER, RESULT], "messages.3.role"),
    ([CALLS, RESULT | {"tool_call_id": "call_2"}], "messages.2.tool_call_id"),
    ([CALLS, RESULT | {"tool_call_id": 3}], "messages.2.tool_call_id"),
    ([CALLS, RESULT | {"content": 3}], "messages.2.content"),
    ([{"role": "assistant", "content": None}], "messages.1.content"),
    ([CALLS | {"tool_calls": {}}], "messages.1.tool_calls"),
    ([CALLS | {"tool_calls": [3]}], "messages.1.tool_calls.0"),
    ([CALLS | {"tool_calls": [CALL | {"id": 3}]}], "messages.1.tool_calls.0.id"),
    ([CALLS | {"tool_calls": [CALL | {"type": "custom"}]}], "messages.1.tool_calls.0.type"),
    ([CALLS | {"tool_calls": [{"id": "a"}]}], "messages.1.tool_calls.0.function"),
    ([CALLS | {"tool_calls": [CALL | {"function": {"name": ""}}]}], "messages.1.tool_calls.0.function.name"),
    ([{"role": "assistant", "function_call": "weather"}], "messages.1.function_call"),
]


@pytest.mark.covers("B.tools.10", "B.tools.17")
@pytest.mark.parametrize(
    ("fields", "param"),
    [*BAD_TOOLS, *(({"messages": [USER, *bad]}, param) for bad, param in BAD_MESSAGES)],
    ids=[param for _, param in (*BAD_TOOLS, *BAD_MESSAGES)],
)
async def test_a_bad_field_is_400_with_its_path(serve: Any, fields: dict[str, Any], param: str) -> None:
    body = {"messages": [USER], "max_tokens": 1} | fields
    async with serve() as served:
        for path, choice in (("/tokenize", {}), ("/v1/chat/completions", {"tool_choice": "none"})):
            answer = await served.client.post(path, json=body | choice)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text

        assert not served.dispatcher.requests


@pytest.mark.covers("B.tools.17")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "always", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {}, "tools": [TOOL]}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]},
         "tool_choice.function.name"),
        (allowing("f"), "tool_choice"),
        (allowing("f") | {"functions": [WEATHER]}, "tool_choice"),
        (allowing("f") | {"tools": [TOOL]}, "tool_choice.allowed_tools.tools.0.function.name"),
        (allowing("weather", mode="none") | {"tools": [TOOL]}, "tool_choice.allowed_tools.mode"),
        (allowing() | {"tools": [TOOL]}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [TOOL]}, "tool_choice.allowed_tools"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "g"}}, "tools": [TOOL]}, "tool_choice.type"),
        ({"function_call": "auto"}, "function_call"),
        ({"function_call": "required", "functions": [WEATHER]}, "function_call"),
        ({"function_call": {"name": "g"}, "functions": [WEATHER]}, "function_call.name"),
        ({"tool_choice": "required", "functions": [WEATHER]}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)  # fmt: skip
async def test_a_choice_of_no_tool_is_refused(serve: Any, fields: dict[str, Any], param: str) -> None:
    async with serve() as served:
        answer = await served.client.post("/v1/chat/completions", json={"messages": [USER]} | fields)

        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
