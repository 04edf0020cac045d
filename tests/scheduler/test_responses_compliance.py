"""The public compliance cases of the Responses API (openresponses.org), and the fields that its schema requires."""

from typing import Any

import jsonschema
import pytest

from tests.scheduler.test_responses import answers, events, joined
from tests.scheduler.test_tool_calls import CALLED

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_renderer")]

_TEXT, _FLAG, _NUMBER, _COUNT = ({"type": kind} for kind in ("string", "boolean", "number", "integer"))
_OBJECT, _LIST = {"type": "object"}, {"type": "array"}
_MAYBE_TEXT, _MAYBE_COUNT, _MAYBE_OBJECT = ({"type": [kind, "null"]} for kind in ("string", "integer", "object"))
FIELDS: dict[str, Any] = {
    "id": _TEXT, "object": {"const": "response"}, "created_at": _COUNT, "completed_at": _MAYBE_COUNT, "status": _TEXT,
    "incomplete_details": _MAYBE_OBJECT, "model": _TEXT, "previous_response_id": _MAYBE_TEXT,
    "instructions": _MAYBE_TEXT, "output": _LIST, "error": _MAYBE_OBJECT, "tools": _LIST,
    "tool_choice": {"type": ["string", "object"]}, "truncation": _TEXT, "parallel_tool_calls": _FLAG, "text": _OBJECT,
    "top_p": _NUMBER, "presence_penalty": _NUMBER, "frequency_penalty": _NUMBER, "top_logprobs": _COUNT,
    "temperature": _NUMBER, "reasoning": _MAYBE_OBJECT, "usage": _MAYBE_OBJECT, "max_output_tokens": _MAYBE_COUNT,
    "max_tool_calls": _MAYBE_COUNT, "store": _FLAG, "background": _FLAG, "service_tier": _TEXT, "metadata": _OBJECT,
    "safety_identifier": _MAYBE_TEXT, "prompt_cache_key": _MAYBE_TEXT,
}  # fmt: skip
RESOURCE = {"type": "object", "required": list(FIELDS), "properties": FIELDS}
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Get the current weather for a location",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def said(role: str, text: str) -> dict[str, str]:
    """Return a message item."""
    return {"type": "message", "role": role, "content": text}


ASKED = said("user", "What's the weather like in Paris?")


@pytest.mark.covers("B.responses.17")
@pytest.mark.parametrize(
    ("fields", "text", "kind"),
    [
        ({"input": [said("user", "Say hello.")]}, "Ahoy", "message"),
        ({"input": [said("system", "You are a pirate."), said("user", "Say hello.")]}, "Ahoy", "message"),
        ({"input": [ASKED], "tools": [WEATHER]}, CALLED, "function_call"),
        (
            {"input": [said("user", "I am Alice."), said("assistant", "Hello!"), said("user", "Who am I?")]},
            "Alice", "message",
        ),
    ],
    ids=["basic", "system prompt", "tool calling", "multi-turn"],
)  # fmt: skip
async def test_a_case_is_a_complete_resource(serve: Any, fields: Any, text: str, kind: str) -> None:
    whole, streamed, _ = await answers(serve, text, fields, tool_call_parser="hermes")

    for response in (whole, streamed):
        jsonschema.validate(response, RESOURCE)
        assert (response["status"], [item["type"] for item in response["output"]]) == ("completed", [kind])


@pytest.mark.covers("B.responses.17")
async def test_a_streamed_call_has_its_events(serve: Any) -> None:
    async with serve(CALLED, tool_call_parser="hermes") as served:
        answer = await served.client.post("/v1/responses", json={"input": [ASKED], "tools": [WEATHER], "stream": True})

    found = events(answer.text)
    assert joined(found)["output"]
    for one in found:
        if "response" in one:
            jsonschema.validate(one["response"], RESOURCE)
    kinds = dict.fromkeys(one["type"].removeprefix("response.") for one in found)
    assert list(kinds)[2:6] == [
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
    ]  # fmt: skip
