"""Requests to /v1/messages: which chat they become, which are refused and where, and errors in Anthropic's format."""

import dataclasses
from typing import Any

import httpx
import pytest

from scheduler.app import build_app
from scheduler.http.keys import Keys
from tests.scheduler.test_messages import ANY, NOW, TOOLS, USER
from wire.errors import DeadlineExceeded, InternalError, NoCapacity, Overloaded, PdserveError, Unavailable

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_renderer")]

DUMP = (
    "{{ messages|tojson }}{{ tools|tojson }}{{ add_generation_prompt }}{{ enable_thinking }}{{ thinking }}"
    "{{ reasoning_effort }}{# content #}"
)
CALL = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Paris"}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "cold"}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
CHAT_NOW = {"type": "function", "function": {"name": "now", "parameters": NOW["input_schema"]}}
HI = {"type": "text", "text": "hi"}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}
EMPTY = {"messages": [{"role": "system", "content": ""}]}


def called(*results: Any) -> list[Any]:
    """Return a conversation with a call and its results."""
    return [USER, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": list(results)}]


def switches(value: bool) -> dict[str, bool]:
    """Return the template variables that `thinking` sets."""
    return {"enable_thinking": value, "thinking": value}


@pytest.mark.covers("B.messages.4")
@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({"messages": [USER]}, {"messages": [USER]}),
        ({"messages": [USER], "system": "Be"}, {"messages": [{"role": "system", "content": "Be"}, USER]}),
        (
            {"messages": [USER], "system": [{"type": "text", "text": "B"}, {"type": "text", "text": "e"}]},
            {"messages": [{"role": "system", "content": "Be"}, USER]},
        ),
        ({"messages": [USER], "system": "x-anthropic-billing-header: cch=1;"}, {"messages": [USER]}),
        (
            {"messages": [USER, {"role": "system", "content": "now"}, USER]},
            {"messages": [USER, {"role": "system", "content": "now"}, USER]},
        ),
        (
            {"messages": [{"role": "user", "content": [HI | {"cache_control": {"type": "ephemeral"}}]}]},
            {"messages": [{"role": "user", "content": "hi"}]},
        ),
        (
            {"messages": [{"role": "user", "content": [HI, HI]}]},
            {"messages": [{"role": "user", "content": [HI, HI]}]},
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": [HI, CALL]}]},
            {"messages": [USER, {"role": "assistant", "content": "hi", "tool_calls": [CHAT_CALL]}]},
        ),
        (
            {"messages": called(RESULT, HI), "tools": [NOW], "tool_choice": {"type": "none"}},
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]},
                    {"role": "tool", "tool_call_id": "c1", "content": "cold"},
                    {"role": "user", "content": "hi"},
                ],
                "tools": [CHAT_NOW],
                "tool_choice": "none",
            },
        ),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": [CALL, CALL | {"id": "c2"}]},
                    {"role": "user", "content": [RESULT, RESULT | {"tool_use_id": "c2", "content": "warm"}]},
                ]
            },
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL, CHAT_CALL | {"id": "c2"}]},
                    {"role": "tool", "tool_call_id": "c1", "content": "cold"},
                    {"role": "tool", "tool_call_id": "c2", "content": "warm"},
                ],
            },
        ),
        (
            {"messages": called(RESULT | {"content": [HI, HI], "is_error": True})},
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]},
                    {"role": "tool", "tool_call_id": "c1", "content": [HI, HI]},
                ],
            },
        ),
        (
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": [
                            THOUGHT,
                            {"type": "redacted_thinking", "data": "x"},
                            HI,
                        ],
                    },
                    USER,
                ]
            },
            {"messages": [USER, {"role": "assistant", "content": "hi", "reasoning": "hm"}, USER]},
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": "The answer is ("}]},
            {
                "messages": [USER, {"role": "assistant", "content": "The answer is ("}],
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
        ),
        (
            {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
            {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
        ),
        (
            {"messages": [USER], "thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
            {"messages": [USER], "reasoning_effort": "none", "chat_template_kwargs": switches(False)},
        ),
        (
            {"messages": [USER], "thinking": {"type": "enabled", "budget_tokens": 3}},
            {"messages": [USER], "chat_template_kwargs": switches(True)},
        ),
        (
            {"messages": [USER], "thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False}},
            {"messages": [USER], "chat_template_kwargs": switches(True) | {"enable_thinking": False}},
        ),
        ({"messages": [USER], "system": []}, {"messages": [USER]}),
        ({"messages": [USER, {"role": "assistant", "content": []}]}, {"messages": [USER]}),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, {"messages": [USER]}),
        (
            {"messages": [USER, {"role": "assistant", "content": [THOUGHT]}]},
            {"messages": [USER, {"role": "assistant", "content": "", "reasoning": "hm"}]},
        ),
        (
            {"messages": [USER], "tools": [NOW | {"type": None}], "tool_choice": {"type": "none"}},
            {"messages": [USER], "tools": [CHAT_NOW], "tool_choice": "none"},
        ),
        (
            {"messages": [USER], "thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}},
            {"messages": [USER], "reasoning_effort": "max"},
        ),
    ],
)  # fmt: skip
async def test_a_body_is_the_prompt_of_the_same_chat(serve: Any, make_model: Any, body: Any, chat: Any) -> None:
    async with serve(folder=make_model(chat_template=DUMP)) as served:
        for path, sent in (("/v1/messages", body | {"max_tokens": 4}), ("/v1/chat/completions", chat)):
            answer = await served.client.post(path, json=sent)
            assert answer.status_code == 200, answer.text

        mine, theirs = (served.context.tokens.decode(one.prompts[0]) for one in served.dispatcher.requests)
        assert mine == theirs


async def test_parameters_reach_the_request(serve: Any) -> None:
    async with serve() as served:
        fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "stop_sequences": ["x"], "cache_salt": "c", "seed": 5}
        body = {"max_tokens": 9, "messages": [USER], "metadata": {"user_id": "u"}, "service_tier": "auto"}
        headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a-beta"}
        answer = await served.client.post("/v1/messages?beta=true", json=body | fields, headers=headers)
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        output = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
        await served.client.post("/v1/messages", json=body | output)
        await served.client.post("/v1/messages", json=body | output | ANY)

        assert answer.status_code == 200, answer.text
        assert "warning" not in answer.headers
        first, formed, forced = served.dispatcher.requests
        assert (first.params.temperature, first.params.top_p, first.params.top_k) == (0.5, 0.9, 7)
        assert (first.params.max_tokens, bool(first.cache_salt), first.params.seed) == (9, True, 5)
        assert '"a"' in formed.params.structured.value
        assert "weather" in forced.params.structured.value


async def test_max_tokens_is_capped_at_the_context(serve: Any) -> None:
    async with serve() as served:
        length = served.context.tokens.max_model_len
        for max_tokens in (length, length + 1, 10**12):
            thinking = {"type": "disabled", "budget_tokens": max_tokens}
            body = {"messages": [USER], "max_tokens": max_tokens, "thinking": thinking}
            answer = await served.client.post("/v1/messages", json=body)

            request = served.dispatcher.requests[-1]
            assert answer.status_code == 200, answer.text
            assert request.params.max_tokens == length - len(request.prompts[0])


def refused(role: str, *blocks: Any) -> dict[str, Any]:
    """Return a body with one message."""
    return {"messages": [{"role": role, "content": list(blocks)}]}


@pytest.mark.covers("B.messages.5")
@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"), ({"messages": [1]}, "messages.0"),
        (EMPTY, "messages"), (EMPTY | {"system": "Be"}, "messages"), (refused("assistant"), "messages"),
        ({"messages": [{"role": "assistant", "content": []}, USER]}, "messages.0.content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"), (refused("user"), "messages.0.content"),
        (refused("user", "hi"), "messages.0.content.0"), (refused("user", {"text": "hi"}), "messages.0.content.0"),
        (refused("user", HI, {"type": "text"}), "messages.0.content.1.text"),
        (refused("user", HI, {"type": "image", "source": {}}), "messages.0.content.1"),
        (refused("user", {"type": "document", "source": {}}), "messages.0.content.0"),
        (refused("user", CALL), "messages.0.content.0"), (refused("assistant", RESULT), "messages.0.content.0"),
        (refused("user", RESULT), "messages.0.content.0.tool_use_id"),
        ({"messages": called(RESULT | {"tool_use_id": "c2"})}, "messages.2.content.0.tool_use_id"),
        (
            {
                "messages": [
                    *called(RESULT),
                    {"role": "assistant", "content": [CALL | {"id": "c2"}]},
                    {"role": "user", "content": [RESULT]},
                ]
            },
            "messages.4.content.0.tool_use_id",
        ),
        ({"messages": called(RESULT | {"content": [{"type": "image"}]})}, "messages.2.content.0.content.0"),
        (refused("assistant", CALL | {"id": None}), "messages.0.content.0.id"),
        (refused("assistant", CALL | {"name": ""}), "messages.0.content.0.name"),
        (refused("assistant", CALL | {"input": "x"}), "messages.0.content.0.input"),
        (refused("assistant", {"type": "thinking"}), "messages.0.content.0.thinking"),
        ({"system": 1}, "system"), ({"system": [{"type": "image"}]}, "system.0"),
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 3}, "temperature"), ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"), ({"stop_sequences": ["x"] * 99}, "stop_sequences"),
        ({"tools": "x"}, "tools"), ({"tools": [{"name": "a"}]}, "tools.0.input_schema"),
        ({"tools": [NOW | {"name": "a b"}]}, "tools.0.name"), ({"tools": [NOW, NOW]}, "tools.1.name"),
        ({"tools": [NOW | {"name": "a" * 129}]}, "tools.0.name is"), ({"tools": [NOW | {"type": ""}]}, "tools.0.type"),
        ({"tools": [NOW | {"name": f"f{at}"} for at in range(1000)]}, "tools has 1000 entries, but the limit is 128"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [NOW | {"input_schema": {"type": "x"}}]}, "tools.0.input_schema.type"),
        ({"tools": [NOW]}, "tool_choice"), ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "x"}}, "tool_choice.type"), ({"tool_choice": "auto"}, "tool_choice"),
        (TOOLS | {"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        (TOOLS | {"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"a": "x" * 70_000}}}}, "output_config"),
        ({"thinking": {"type": "x"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 4}}, "thinking.budget_tokens"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"), ({"thread": {"type": "create"}}, "thread"),
        ({"ticket": "x"}, "ticket"), ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ],
)  # fmt: skip
async def test_a_bad_body_is_refused_with_the_path_of_the_field(serve: Any, fields: Any, path: str) -> None:
    async with serve() as served:
        answer = await served.client.post("/v1/messages", json={"messages": [USER], "max_tokens": 4} | fields)

        error = answer.json()
        assert (answer.status_code, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
        assert path in error["error"]["message"]
        assert ("details" in error["error"]) == (path == "thread")
        assert error["request_id"] == answer.headers["request-id"]
        assert not served.dispatcher.requests


@pytest.mark.covers("B.messages.6")
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_http_errors_have_anthropics_format(serve: Any, path: str) -> None:
    body = {"messages": [USER], "max_tokens": 4}
    async with serve(max_body_bytes=2000) as served:
        keyed = build_app(dataclasses.replace(served.context, keys=Keys(["sk-mine"])))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(keyed), base_url="http://test") as client:
            answers = [
                await client.post(path, json=body),
                await client.post(path, json=body, headers={"x-api-key": "sk-mine"}),
                await served.client.post(path, json=body | {"model": "none"}),
                await served.client.get(path),
                await served.client.post(path, json=body | {"system": "x" * 3000}),
                await served.client.post(path, content=b"{"),
            ]

    shown = [(one.status_code, one.json().get("error", {}).get("type")) for one in answers]
    assert shown == [
        (401, "authentication_error"), (200, None), (404, "not_found_error"), (405, "invalid_request_error"),
        (413, "request_too_large"), (400, "invalid_request_error"),
    ]  # fmt: skip


@pytest.mark.covers("B.messages.6")
@pytest.mark.parametrize("path", ["/v1/messages/", "/v1/messages/batches", "/v1/messages/batches/x?limit=1"])
async def test_unknown_paths_below_have_anthropics_errors(serve: Any, path: str) -> None:
    async with serve() as served:
        keyed = build_app(dataclasses.replace(served.context, keys=Keys(["sk-mine"])))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(keyed), base_url="http://test") as client:
            answers = [await served.client.get(path), await client.post(path, json={})]
        other = await served.client.get("/v1/messages2")

    for answer, status, kind in zip(answers, (404, 401), ("not_found_error", "authentication_error"), strict=True):
        body = answer.json()
        assert (answer.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
        assert body["request_id"] == answer.headers["request-id"]
    assert (other.json()["error"]["code"], "request-id" in other.headers) == (404, False)


@pytest.mark.covers("B.messages.6")
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("full", 3), 529, "overloaded_error"), (NoCapacity("full"), 529, "overloaded_error"),
        (Unavailable("no path"), 529, "overloaded_error"), (DeadlineExceeded("late"), 504, "timeout_error"),
        (InternalError("bug"), 500, "api_error"),
    ],
)  # fmt: skip
async def test_what_fails_a_request_has_anthropics_types(
    serve: Any, error: PdserveError, status: int, kind: str
) -> None:
    async with serve() as served:
        served.dispatcher.refuse_with = error
        for stream in (False, True):
            body = {"messages": [USER], "max_tokens": 4, "stream": stream}
            answer = await served.client.post("/v1/messages", json=body)

            assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
            assert ("retry-after" in answer.headers) == (status == 529)
