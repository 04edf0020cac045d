"""litellm: chats, streams, tools, rerank and vectors by `hosted_vllm/`, Anthropic's messages by it and by `anthropic/`.

Its acreate streams `anthropic/` only where its proxy is installed too, so that stream is read by `completion`.
"""

import asyncio
import json
import os
from typing import Any

import pytest

from tests.conformance.scripted_model import ANSWER, BEFORE_CALLS, PLAN, THINKING, text_of

pytestmark = [
    pytest.mark.cluster, pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),  # its own, and of connections that it leaves open
]  # fmt: skip

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # the import would download prices
litellm = pytest.importorskip("litellm", reason="missing tool: litellm (pip install 'pdserve[clients]')")

CITY = {
    "type": "object", "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
CALLS = [("weather", {"city": "Zürich ☀ or <tool_call>", "days": [1, 2]}), ("now", {})]
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}], "max_tokens": 200, "temperature": 0, "api_key": "none",
    "num_retries": 0,
}  # fmt: skip


@pytest.fixture(params=("hosted_vllm", "anthropic"))
def ask(request: pytest.FixtureRequest, pair: str) -> dict[str, Any]:
    """A question to a provider, over P/D."""
    base = pair if request.param == "anthropic" else f"{pair}/v1"
    return ASK | {"model": f"{request.param}/tiny", "api_base": base}


@pytest.mark.covers("B.clients.7")
@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS}], ids=["text", "calls"])
def test_a_chat_and_its_stream_are_those_of_the_model(ask: dict[str, Any], fields: dict[str, Any]) -> None:
    whole = litellm.completion(**ask, **fields)
    chunks = list(litellm.completion(**ask, **fields, stream=True, stream_options={"include_usage": True}))
    joined = litellm.stream_chunk_builder(chunks, messages=ask["messages"])

    for answer in (whole, joined):
        (choice,) = answer.choices
        text, thinking = (BEFORE_CALLS, PLAN) if fields else (ANSWER, THINKING)
        assert choice.finish_reason == ("tool_calls" if fields else "stop")
        assert (choice.message.content, choice.message.reasoning_content) == (text_of(text), text_of(thinking))
        calls = [one.function for one in choice.message.tool_calls or ()]
        assert [(one.name, json.loads(one.arguments)) for one in calls] == (CALLS if fields else [])
    assert joined.usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.covers("B.clients.7")
def test_a_forced_call_fits_its_schema(ask: dict[str, Any]) -> None:
    answer = litellm.completion(**ask, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)

    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


@pytest.mark.covers("B.clients.7")
@pytest.mark.parametrize("fields", [{}, {"tools": [{"name": "weather", "input_schema": CITY}]}], ids=["text", "calls"])
def test_its_bridge_answers_in_the_format_of_anthropic(ask: dict[str, Any], fields: dict[str, Any]) -> None:
    body = asyncio.run(litellm.anthropic.messages.acreate(**ask, **fields))

    thinking, text, *calls = body["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", text_of(PLAN if fields else THINKING))
    assert (text["type"], text["text"]) == ("text", text_of(BEFORE_CALLS if fields else ANSWER))
    assert [(call["name"], call["input"]) for call in calls] == (CALLS if fields else [])
    assert body["stop_reason"] == ("tool_use" if fields else "end_turn")


@pytest.mark.covers("B.clients.7")
def test_its_bridge_streams_in_the_format_of_anthropic(pair: str) -> None:
    body = ASK | {"model": "hosted_vllm/tiny", "api_base": f"{pair}/v1"}

    events = asyncio.run(_events(body))

    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == text_of(THINKING)
    assert "".join(delta.get("text", "") for delta in deltas) == text_of(ANSWER)
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")


async def _events(body: dict[str, Any]) -> list[dict[str, Any]]:
    stream = await litellm.anthropic.messages.acreate(**body, stream=True)
    lines = b"".join([event async for event in stream]).decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


@pytest.mark.covers("B.clients.7")
def test_documents_are_ranked_by_their_score(pair: str) -> None:
    answer = litellm.rerank(
        model="hosted_vllm/tiny", query="hello", documents=["the fox", "hello"], top_n=1, api_base=pair, api_key="none"
    )

    (best,) = answer.results
    assert (best["index"], best["document"]["text"]) == (1, "hello")
    assert best["relevance_score"] == pytest.approx(1)


@pytest.mark.covers("B.clients.7")
def test_texts_become_vectors_of_length_one(pair: str) -> None:
    answer = litellm.embedding(
        model="hosted_vllm/tiny", input=["hello", "the fox"], api_base=f"{pair}/v1", api_key="none"
    )

    assert [sum(x * x for x in one["embedding"]) for one in answer.data] == pytest.approx([1, 1], abs=1e-4)


@pytest.mark.covers("B.clients.7")
def test_errors_have_the_classes_of_litellm(ask: dict[str, Any]) -> None:
    with pytest.raises(litellm.NotFoundError, match="no-such"):
        litellm.completion(**ask | {"model": ask["model"].replace("tiny", "no-such")})
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**ask | {"temperature": 9})
