"""huggingface_hub: InferenceClient's chats, streams, tools and structured outputs.

Its other tasks, text_generation among them, send the body of TGI or of the hub's own API, which is not served.
"""

import json
from collections.abc import Iterator
from typing import Any

import huggingface_hub
import pytest

from tests.conformance.scripted_model import ANSWER, text_of

pytestmark = [pytest.mark.cluster, pytest.mark.long]

CITY = {
    "type": "object", "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
ASK: dict[str, Any] = {
    "model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 200, "temperature": 0
}  # fmt: skip


@pytest.fixture(params=(("pair", ""), ("pair", "/v1"), ("combined", "/v1")), ids="".join)
def client(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A client of either base URL."""
    way, path = request.param
    url = request.getfixturevalue(way) + path
    with huggingface_hub.InferenceClient(base_url=url, api_key="none", timeout=300) as client:
        yield client


@pytest.mark.covers("B.clients.10")
def test_a_chat_and_its_stream_are_those_of_the_model(client: Any) -> None:
    whole = client.chat.completions.create(**ASK)
    chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))

    assert whole.choices[0].message.content == text_of(ANSWER)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text_of(ANSWER)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.covers("B.clients.10")
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls_are_those_of_the_model(client: Any, choice: str) -> None:
    answer = client.chat_completion(**ASK, tools=TOOLS, tool_choice=choice)
    chunks = list(client.chat_completion(**ASK, tools=TOOLS, tool_choice=choice, stream=True))

    calls = [(one.function.name, one.function.arguments) for one in answer.choices[0].message.tool_calls]
    deltas = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or ()]
    streamed = [
        (one.function.name, "".join(each.function.arguments or "" for each in deltas if each.index == one.index))
        for one in deltas
        if one.id
    ]
    assert streamed == calls
    assert calls[0][0] == "weather"
    assert json.loads(calls[0][1])["city"]


@pytest.mark.covers("B.clients.10")
def test_an_answer_fits_a_schema(client: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "report", "schema": CITY, "strict": True}}

    answer = client.chat_completion(**ASK, response_format=form)

    assert json.loads(answer.choices[0].message.content)["city"] in ("Paris", "Rome")


@pytest.mark.covers("B.clients.10")
def test_a_client_must_name_the_model(client: Any) -> None:
    """Without a name it sends `dummy`, which TGI takes; a name that is not served is a 404 as in vLLM."""
    with pytest.raises(
        huggingface_hub.errors.HfHubHTTPError, match="the model 'dummy' does not exist here; served: tiny"
    ):
        client.chat_completion(**ASK | {"model": None})
