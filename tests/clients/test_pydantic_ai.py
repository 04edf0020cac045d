"""pydantic-ai-slim: agents with tools, structured outputs and streams, by chats and by responses."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.conformance.scripted_model import ANSWER, text_of

pytestmark = [pytest.mark.cluster, pytest.mark.long]

pydantic_ai = pytest.importorskip("pydantic_ai", reason="missing tool: pydantic-ai (pip install 'pdserve[clients]')")
models = pytest.importorskip("pydantic_ai.models.openai")
providers = pytest.importorskip("pydantic_ai.providers.openai")

SETTINGS = {"temperature": 0, "max_tokens": 200}
CALLS = [("weather", "Zürich ☀ or <tool_call>", [1, 2]), ("now",)]


class Report(BaseModel):
    """What an answer must say."""

    city: Literal["Paris", "Rome"]
    cold: bool


class Tools:
    """Two tools that note their calls; an agent has them in its first step only, so that its loop ends."""

    def __init__(self) -> None:
        self.called: list[tuple[Any, ...]] = []

    def weather(self, city: str, days: list[int]) -> str:
        """Return the weather."""
        self.called.append(("weather", city, days))
        return "cold"

    def now(self) -> str:
        """Return the time."""
        self.called.append(("now",))
        return "noon"

    @property
    def listed(self) -> list[Any]:
        """The tools of an agent."""
        return [pydantic_ai.Tool(tool, prepare=_in_first_step) for tool in (self.weather, self.now)]


async def _in_first_step(context: Any, tool: Any) -> Any:
    return tool if context.run_step == 1 else None


@pytest.fixture(params=("OpenAIChatModel", "OpenAIResponsesModel"))
def kind(request: pytest.FixtureRequest) -> str:
    """A class of models."""
    return str(request.param)


@asynccontextmanager
async def _model(url: str, kind: str) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield getattr(models, kind)("tiny", provider=providers.OpenAIProvider(openai_client=client))


@pytest.mark.covers("B.clients.8")
def test_an_agent_calls_its_tools_and_answers(pair: str, kind: str) -> None:
    tools = Tools()

    async def run() -> Any:
        async with _model(pair, kind) as model:
            agent = pydantic_ai.Agent(model, tools=tools.listed, model_settings=SETTINGS)
            return await agent.run("hello")

    result = asyncio.run(run())

    assert sorted(map(str, tools.called)) == sorted(map(str, CALLS))
    assert result.output == text_of(ANSWER)
    assert result.usage.requests == 2


@pytest.mark.covers("B.clients.8")
def test_a_call_is_one_of_the_tools_that_are_chosen(pair: str, kind: str) -> None:
    """They are sent as `allowed_tools`, since there are others."""
    tools = [pydantic_ai.ToolDefinition(name=name) for name in ("north", "west", "south")]
    parameters = pydantic_ai.models.ModelRequestParameters(function_tools=tools)
    settings = SETTINGS | {"tool_choice": ["west", "south"], "parallel_tool_calls": False}

    async def run() -> Any:
        async with _model(pair, kind) as model:
            prompt = [pydantic_ai.ModelRequest.user_text_prompt("hello")]
            return await model.request(prompt, settings, parameters)

    (call,) = asyncio.run(run()).tool_calls

    assert call.tool_name in ("west", "south")


@pytest.mark.covers("B.clients.8")
def test_a_stream_joins_to_the_answer(pair: str, kind: str) -> None:
    async def run() -> tuple[list[str], Any]:
        async with _model(pair, kind) as model:
            agent = pydantic_ai.Agent(model, instructions="Be brief.", model_settings=SETTINGS)
            async with agent.run_stream("hello") as stream:
                return [text async for text in stream.stream_text(delta=True, debounce_by=None)], stream.usage

    texts, usage = asyncio.run(run())

    assert "".join(texts) == text_of(ANSWER)
    assert len(texts) > 5
    assert usage.output_tokens > len(ANSWER)


@pytest.mark.covers("B.clients.8")
@pytest.mark.parametrize("output", ["ToolOutput", "NativeOutput"])
def test_an_output_is_of_its_class_whole_and_streamed(pair: str, kind: str, output: str) -> None:
    async def run() -> tuple[Any, list[Any]]:
        async with _model(pair, kind) as model:
            wanted = getattr(pydantic_ai, output)(Report)
            agent = pydantic_ai.Agent(
                model, output_type=wanted, model_settings=SETTINGS | {"parallel_tool_calls": False}
            )
            whole = await agent.run("hello")
            async with agent.run_stream("hello") as stream:
                return whole.output, [part async for part in stream.stream_output(debounce_by=None)]

    whole, parts = asyncio.run(run())

    assert isinstance(whole, Report)
    assert parts[-1] == whole
