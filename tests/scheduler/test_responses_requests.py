"""Requests to /v1/responses: which chat they are, what is cut from a long one, and what is refused and where."""

from typing import Any

import pytest

from tests.scheduler.test_responses import NOW, TOOLS, WEATHER, checked

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_renderer")]

DUMP = (
    "{{ messages|tojson(sort_keys=True) }}{{ tools|tojson }}{{ add_generation_prompt }}{{ enable_thinking }}"
    "{{ reasoning_effort }}{# content #}"
)
USER = {"role": "user", "content": "hello"}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Paris"}', "id": "fc_1"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "cold"}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
CHAT_RESULT = {"role": "tool", "tool_call_id": "c1", "content": "cold"}
CHAT_WEATHER = {"type": "function", "function": {name: WEATHER[name] for name in ("name", "parameters")}}
CHAT_NOW = {"type": "function", "function": {"name": "now"}}
PART = {"type": "input_text", "text": "hi"}
HI = {"type": "text", "text": "hi"}
SAID = {
    "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
    "content": [{"type": "output_text", "text": "hi", "annotations": [], "logprobs": []}],
}  # fmt: skip
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
SUMMARY = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "x"}
ENCRYPTED: dict[str, Any] = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]}
SWITCHED = {"chat_template_kwargs": {"enable_thinking": False}}
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}


@pytest.mark.covers("B.responses.4")
@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({"input": "hello"}, {"messages": [USER]}),
        ({"input": [USER | {"type": None, "status": {}}]}, {"messages": [USER]}),
        (
            {"input": [USER, {"role": "assistant", "content": "hi", "status": {}}]},
            {"messages": [USER, {"role": "assistant", "content": "hi"}]},
        ),
        ({"input": [USER], "instructions": "Be"}, {"messages": [{"role": "system", "content": "Be"}, USER]}),
        (
            {"input": [{"type": "message", "role": "developer", "content": "Be"}, USER]},
            {"messages": [{"role": "system", "content": "Be"}, USER]},
        ),
        ({"input": [{"role": "user", "content": [PART]}]}, {"messages": [{"role": "user", "content": "hi"}]}),
        ({"input": [{"role": "user", "content": [PART, PART]}]}, {"messages": [{"role": "user", "content": [HI, HI]}]}),
        ({"input": [USER, SAID, USER]}, {"messages": [USER, {"role": "assistant", "content": "hi"}, USER]}),
        ({"input": [USER, CALL, RESULT]}, {"messages": [USER, CALLED, CHAT_RESULT]}),
        (
            {"input": [USER, CALL, RESULT | {"output": [PART]}]},
            {"messages": [USER, CALLED, CHAT_RESULT | {"content": "hi"}]},
        ),
        (
            {"input": [USER, CALL, CALL | {"call_id": "c2"}, RESULT, RESULT | {"call_id": "c2", "output": ""}]},
            {
                "messages": [
                    USER,
                    CALLED | {"tool_calls": [CHAT_CALL, CHAT_CALL | {"id": "c2"}]},
                    CHAT_RESULT,
                    CHAT_RESULT | {"tool_call_id": "c2", "content": ""},
                ]
            },
        ),
        (
            {"input": [USER, THOUGHT, SAID, CALL, RESULT]},
            {"messages": [USER, CALLED | {"content": "hi", "reasoning": "hm"}, CHAT_RESULT]},
        ),
        (
            {"input": [USER, THOUGHT, CALL, SUMMARY, CALL | {"call_id": "c2"}, RESULT]},
            {
                "messages": [
                    USER,
                    CALLED | {"reasoning": "hmhm", "tool_calls": [CHAT_CALL, CHAT_CALL | {"id": "c2"}]},
                    CHAT_RESULT,
                ]
            },
        ),
        (
            {"input": [USER, THOUGHT, SAID, THOUGHT, SAID, USER]},
            {"messages": [USER, *[{"role": "assistant", "content": "hi", "reasoning": "hm"}] * 2, USER]},
        ),
        ({"input": [USER, ENCRYPTED, SAID, USER]}, {"messages": [USER, {"role": "assistant", "content": "hi"}, USER]}),
        (
            {"input": [USER, {"role": "assistant", "content": "The answer is (", "status": "incomplete"}]},
            {
                "messages": [USER, {"role": "assistant", "content": "The answer is ("}],
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
        ),
        (
            {"input": "hello", "tools": [WEATHER], "tool_choice": "none"},
            {"messages": [USER], "tools": [CHAT_WEATHER], "tool_choice": "none"},
        ),
        (
            {"input": "hello", "tools": [WEATHER, NOW], "tool_choice": ALLOWED},
            {"messages": [USER], "tools": [CHAT_NOW], "tool_choice": "required"},
        ),
        (
            {"input": "hello", "tools": [WEATHER, NOW], "tool_choice": ALLOWED | {"mode": "auto"}},
            {"messages": [USER], "tools": [CHAT_NOW]},
        ),
        (
            {"input": "hello", "reasoning": {"effort": "high", "summary": "auto"}},
            {"messages": [USER], "reasoning_effort": "high"},
        ),
        ({"input": "hello"} | SWITCHED, {"messages": [USER]} | SWITCHED),
    ],
)  # fmt: skip
async def test_a_body_is_the_prompt_of_the_same_chat(serve: Any, make_model: Any, body: Any, chat: Any) -> None:
    async with serve(folder=make_model(chat_template=DUMP), tool_call_parser="hermes") as served:
        for path, sent in (("/v1/responses", body | {"max_output_tokens": 4}), ("/v1/chat/completions", chat)):
            answer = await served.client.post(path, json=sent)
            assert answer.status_code == 200, answer.text

        mine, theirs = (served.context.tokens.decode(one.prompts[0]) for one in served.dispatcher.requests)
        assert mine == theirs


async def test_parameters_reach_the_request_and_the_answer(serve: Any) -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 5, "presence_penalty": 0.5, "stop": "x"}
    shown = {
        "max_output_tokens": 9, "metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k",
        "max_tool_calls": 3, "instructions": "Be", "truncation": "disabled", "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": "auto"}, "top_logprobs": 2,
    }  # fmt: skip
    other = {"service_tier": "auto", "store": True, "include": ["reasoning.encrypted_content"], "cache_salt": "c"}
    async with serve() as served:
        body = {"input": "hi"} | sampling | shown | other
        answer = await served.client.post("/v1/responses", json=body, headers={"x-request-id": "mine"})

        assert answer.status_code == 200, answer.text
        assert "warning" not in answer.headers
        response, params = checked(answer.json()), served.dispatcher.requests[0].params
        assert {name: response[name] for name in shown} == shown
        assert (response["id"], answer.headers["x-request-id"]) == ("resp_mine", "mine")
        assert (response["store"], response["service_tier"], response["tools"]) == (False, "default", [])
        assert (response["temperature"], response["top_p"], response["presence_penalty"]) == (0.5, 0.9, 0.5)
        assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 7, 5)
        assert (params.max_tokens, params.presence_penalty, params.logprobs) == (9, 0.5, None)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "name": "one", "schema": SCHEMA, "strict": True}


@pytest.mark.covers("B.responses.6")
@pytest.mark.parametrize(
    ("fields", "kind", "expected"),
    [
        ({"text": {"format": FORMAT}}, "json", '"a"'),
        ({"text": {"format": {"type": "json_object"}, "verbosity": "low"}}, "json_object", ""),
        ({"text": {"format": {"type": "text"}}}, None, ""),
        (TOOLS | {"tool_choice": "required", "text": {"format": FORMAT}}, "json", "weather"),
        (TOOLS | {"tool_choice": ALLOWED}, "json", "now"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", '"b"'),
    ],
)
async def test_forms_reach_the_request(serve: Any, fields: Any, kind: str | None, expected: str) -> None:
    async with serve() as served:
        answer = await served.client.post("/v1/responses", json={"input": "hi"} | fields)

        assert answer.status_code == 200, answer.text
        response, form = checked(answer.json()), served.dispatcher.requests[0].params.structured
        assert response["text"]["format"] == fields.get("text", {"format": {"type": "text"}})["format"]
        assert [tool["name"] for tool in response["tools"]] == [tool["name"] for tool in fields.get("tools", ())]
        assert response["tool_choice"] == fields.get("tool_choice", "auto")
        assert (form and form.kind) == kind
        assert form is None or expected in form.value
        assert "weather" not in fields.get("tool_choice", {}) or "weather" not in form.value


async def test_max_output_tokens_is_capped_at_the_context(serve: Any) -> None:
    async with serve() as served:
        length = served.context.tokens.max_model_len
        for limit in (length, 10**9, None):
            answer = await served.client.post("/v1/responses", json={"input": "hi", "max_output_tokens": limit})

            request = served.dispatcher.requests[-1]
            assert answer.status_code == 200, answer.text
            assert request.params.max_tokens == length - len(request.prompts[0])
            assert answer.json()["max_output_tokens"] == limit


def turn(number: int) -> list[Any]:
    """Return a turn of a conversation, with a call and its result, in about 70 tokens."""
    called = CALL | {"call_id": f"c{number}"}
    return [{"role": "user", "content": f"turn {number} " * 5}, called, RESULT | {"call_id": f"c{number}"}, SAID]


@pytest.mark.covers("B.responses.8")
@pytest.mark.parametrize(
    ("fields", "first"),
    [
        ({"input": [*turn(1), *turn(2), USER], "max_output_tokens": 10}, "turn 1"),
        ({"input": [*(item for at in range(40) for item in turn(at)), USER], "max_output_tokens": 10}, None),
        ({"input": [*(item for at in range(40) for item in turn(at)), USER]}, None),
        ({"input": [USER, *(item for at in range(40) for item in turn(at)[1:])]}, "assistant"),
    ],
)
async def test_truncation_drops_the_oldest_items(
    serve: Any, make_model: Any, fields: Any, first: str | None
) -> None:  # fmt: skip
    template = (
        "{% for one in messages %}[{{ one.role }} {{ one.content }}{% for call in one.tool_calls %}"
        "{{ call.function.name }}{% endfor %}]{% endfor %}{# content #}"
    )
    async with serve(folder=make_model(chat_template=template)) as served:
        body = fields | {"instructions": "Be brief."}
        cut = await served.client.post("/v1/responses", json=body | {"truncation": "auto"})
        whole = await served.client.post("/v1/responses", json=body)
        counted = await served.client.post("/v1/responses/input_tokens", json=body | {"truncation": "auto"})
        counted_whole = await served.client.post("/v1/responses/input_tokens", json=body)

        assert cut.status_code == 200, cut.text
        tokens = served.context.tokens
        room = tokens.max_model_len - fields.get("max_output_tokens", tokens.max_model_len // 8)
        request = served.dispatcher.requests[0]
        text = tokens.decode(request.prompts[0])
        assert text.startswith(f"[system Be brief.][{'user turn' if first != 'assistant' else first}")
        assert len(request.prompts[0]) <= room
        assert counted.json() == {"object": "response.input_tokens", "input_tokens": len(request.prompts[0])}
        if first == "turn 1":
            assert (whole.status_code, len(served.dispatcher.requests[1].prompts[0])) == (200, len(request.prompts[0]))
            assert counted_whole.json() == counted.json()
        else:
            assert len(request.prompts[0]) > room - 100
            assert counted_whole.json()["input_tokens"] > room
            error = whole.json()["error"]
            assert (whole.status_code, error["param"]) == (400, "input")
            assert str(tokens.max_model_len) in error["message"]


async def test_truncation_never_drops_the_last_message(serve: Any) -> None:
    async with serve() as served:
        body = {"input": [USER, {"role": "user", "content": "long " * 600}], "truncation": "auto"}
        answer = await served.client.post("/v1/responses", json=body)

        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


def one(item: Any) -> dict[str, Any]:
    """Return a body with one item."""
    return {"input": [item]}


def parts(role: str, *content: Any) -> dict[str, Any]:
    """Return a body with one message."""
    return one({"role": role, "content": list(content)})


@pytest.mark.covers("B.responses.5")
@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"input": None}, "input"), ({"input": []}, "input"), ({"input": {}}, "input"), (one("hi"), "input.0"),
        (one({"type": "message"}), "input.0.role"), (one({"role": "tool", "content": "x"}), "input.0.role"),
        (one({"role": "user"}), "input.0.content"), (parts("user"), "input.0.content"), (one(ENCRYPTED), "input"),
        (parts("user", PART, {"type": "input_text"}), "input.0.content.1.text"),
        (parts("user", "hi"), "input.0.content.0"),
        (parts("user", PART, {"type": "input_image", "image_url": "data:"}), "input.0.content.1"),
        (parts("user", {"type": "input_file"}), "input.0.content.0"),
        (parts("user", {"type": "x"}), "input.0.content.0"),
        (parts("user", {"type": {}}), "input.0.content.0"), (one({"type": {}}), "input.0.type"),
        (one({"type": "item_reference", "id": "x"}), "input.0"), (one({"type": "web_search_call"}), "input.0.type"),
        (one({"type": 1}), "input.0.type"),
        (one(CALL | {"call_id": ""}), "input.0.call_id"), (one(CALL | {"name": None}), "input.0.name"),
        (one(CALL | {"arguments": {}}), "input.0.arguments"), (one(RESULT), "input.0.call_id"),
        ({"input": [CALL, RESULT | {"call_id": "c2"}]}, "input.1.call_id"),
        ({"input": [CALL, RESULT | {"call_id": None}]}, "input.1.call_id"),
        ({"input": [CALL, RESULT | {"output": 1}]}, "input.1.output"),
        ({"input": [CALL, RESULT | {"output": [{"type": "input_image"}]}]}, "input.1.output.0"),
        (one({"type": "reasoning", "content": "x"}), "input.0.content"),
        (one({"type": "reasoning", "summary": [{}]}), "input.0.summary.0.text"),
        ({"instructions": 1}, "instructions"), ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**30}, "max_output_tokens"), ({"max_tool_calls": 10**30}, "max_tool_calls"),
        ({"top_logprobs": 10**30}, "top_logprobs"),
        ({"temperature": 3}, "temperature"), ({"top_p": 0}, "top_p"), ({"truncation": "x"}, "truncation"),
        ({"include": ["x"]}, "include.0"), ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(at): "x" for at in range(17)}}, "metadata"),
        ({"metadata": {"x" * 65: "x"}}, f"metadata.{'x' * 65}.[key]"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"), ({"safety_identifier": "x" * 129}, "safety_identifier"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"top_logprobs": -1}, "top_logprobs"), ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"reasoning": {"effort": "x"}}, "reasoning.effort"), ({"text": {"verbosity": "x"}}, "text.verbosity"),
        ({"text": {"format": {"type": "x"}}}, "text.format.type"),
        ({"text": {"format": FORMAT | {"schema": None}}}, "text.format.schema"),
        ({"text": {"format": FORMAT | {"name": None}}}, "text.format.name"),
        ({"text": {"format": FORMAT | {"schema": {"a": "x" * 70_000}}}}, "text.format.schema"),
        ({"text": {"format": FORMAT}, "structured_outputs": {"regex": "a"}}, "text.format"),
        ({"tools": "x"}, "tools"), ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [NOW | {"name": "a b"}]}, "tools.0.name"), ({"tools": [NOW, NOW]}, "tools.1.name"),
        ({"tools": [NOW | {"parameters": {"type": "x"}}]}, "tools.0.parameters.type"),
        ({"tools": [NOW | {"name": "a" * 65}]}, "tools.0.name"),
        ({"tools": [NOW | {"name": f"f{at}"} for at in range(129)]}, "tools"),
        ({"tools": [NOW]}, "tool_choice"), ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "now"}}, "tool_choice"),
        ({"tool_choice": ALLOWED}, "tool_choice"),
        (TOOLS | {"tool_choice": "x"}, "tool_choice"), (TOOLS | {"tool_choice": 1}, "tool_choice"),
        (TOOLS | {"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        (TOOLS | {"tool_choice": {"type": "function"}}, "tool_choice.name"),
        (TOOLS | {"tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        (TOOLS | {"tool_choice": ALLOWED | {"mode": "x"}}, "tool_choice.mode"),
        (TOOLS | {"tool_choice": ALLOWED | {"mode": "auto"}}, "tool_choice.mode"),
        (TOOLS | {"tool_choice": ALLOWED | {"tools": []}}, "tool_choice.tools"),
        (TOOLS | {"tool_choice": ALLOWED | {"tools": [{"type": "mcp"}]}}, "tool_choice.tools.0.name"),
        (TOOLS | {"tool_choice": ALLOWED | {"tools": [NOW | {"name": "x"}]}}, "tool_choice.tools.0.name"),
        ({"prompt": {"id": "x"}}, "prompt"), ({"conversation": "x"}, "conversation"), ({"n": 2}, "n"),
        ({"background": True}, "background"),
        ({"response_format": {"type": "json_object"}}, "response_format"), ({"max_tokens": 3}, "max_tokens"),
        ({"ticket": "x"}, "ticket"), ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ],
)  # fmt: skip
async def test_a_bad_body_is_refused_with_the_path_of_the_field(serve: Any, fields: Any, path: str) -> None:
    async with serve() as served:
        answer = await served.client.post("/v1/responses", json={"input": "hello"} | fields)

        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (400, "invalid_request_error", 400)
        assert error["param"] == path, error
        assert not served.dispatcher.requests
