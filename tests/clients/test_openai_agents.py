"""openai-agents: runs with function tools, structured outputs and streams, by chats and by responses."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.conformance.scripted_model import ANSWER, NUM_TOKENS, text_of

pytestmark = [pytest.mark.cluster, pytest.mark.long]

agents = pytest.importorskip("agents", reason="missing tool: openai-agents (pip install 'pdserve[clients]')")

ITEMS = [
    "reasoning_item_created", "message_output_created", "tool_called", "tool_called", "tool_output", "tool_output",
    "reasoning_item_created", "message_output_created",
]  # fmt: skip


class Report(BaseModel):
    """What an answer must say."""

    city: Literal["Paris", "Rome"]


class Tools:
    """Two tools that note their calls; an agent has them until it has called one, so that its loop ends."""

    def __init__(self) -> None:
        self.called: list[Any] = []
        self.listed = [agents.function_tool(tool, is_enabled=self._is_first) for tool in (self.weather, self.now)]

    def weather(self, city: str, days: list[int]) -> str:
        """Return the weather."""
        self.called.append((city, days))
        return "cold"

    def now(self) -> str:
        """Return the time."""
        self.called.append("now")
        return "noon"

    def _is_first(self, context: Any, agent: Any) -> bool:
        return not self.called


@pytest.fixture(params=("OpenAIChatCompletionsModel", "OpenAIResponsesModel"))
def kind(request: pytest.FixtureRequest) -> str:
    """The library's class for each of the two APIs."""
    return str(request.param)


@asynccontextmanager
async def _agent(url: str, kind: str, **fields: Any) -> AsyncIterator[Any]:
    agents.set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        settings = agents.ModelSettings(temperature=0, max_tokens=200, store=True)
        yield agents.Agent("one", model=getattr(agents, kind)("tiny", client), model_settings=settings, **fields)


@pytest.mark.covers("B.clients.9")
def test_a_run_calls_its_tools_and_answers(pair: str, kind: str) -> None:
    tools = Tools()

    async def run() -> Any:
        async with _agent(pair, kind, instructions="Be brief.", tools=tools.listed) as agent:
            return await agents.Runner.run(agent, "hello")

    result = asyncio.run(run())

    assert sorted(map(str, tools.called)) == sorted(map(str, [("Zürich ☀ or <tool_call>", [1, 2]), "now"]))
    assert result.final_output == text_of(ANSWER)
    assert result.context_wrapper.usage.output_tokens == NUM_TOKENS["tools"] + NUM_TOKENS["text"]


@pytest.mark.covers("B.clients.9")
def test_a_streamed_run_has_the_same_items_and_answer(pair: str, kind: str) -> None:
    tools = Tools()

    async def run() -> tuple[Any, list[Any]]:
        async with _agent(pair, kind, tools=tools.listed) as agent:
            result = agents.Runner.run_streamed(agent, "hello")
            return result, [event async for event in result.stream_events()]

    result, events = asyncio.run(run())

    assert result.final_output == text_of(ANSWER)
    assert [event.name for event in events if event.type == "run_item_stream_event"] == ITEMS
    raw = [event.data for event in events if event.type == "raw_response_event"]
    deltas = [one.delta for one in raw if one.type == "response.output_text.delta"]
    assert "".join(deltas).endswith(text_of(ANSWER))


@pytest.mark.covers("B.clients.9")
def test_an_output_is_of_its_class(pair: str, kind: str) -> None:
    async def run() -> Any:
        async with _agent(pair, kind, output_type=Report) as agent:
            return await agents.Runner.run(agent, "hello")

    assert isinstance(asyncio.run(run()).final_output, Report)


@pytest.mark.covers("B.clients.9")
def test_a_run_goes_on_from_a_stored_response(pair: str) -> None:
    async def run() -> tuple[Any, Any]:
        async with _agent(pair, "OpenAIResponsesModel") as agent:
            first = await agents.Runner.run(agent, "hello")
            return first, await agents.Runner.run(agent, "and now?", previous_response_id=first.last_response_id)

    first, second = asyncio.run(run())

    assert second.final_output == text_of(ANSWER)
    assert second.context_wrapper.usage.input_tokens > 2 * first.context_wrapper.usage.input_tokens
