"""openai (Python): responses, streams, loops of tools and parsed classes; it validates each answer."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

pytestmark = [pytest.mark.cluster, pytest.mark.long]

ASK: dict[str, Any] = {"model": "tiny", "input": "hello", "max_output_tokens": 64, "temperature": 0}
TURNS = [
    {"type": "message", "role": "system", "content": "You are a pirate."},
    {"type": "message", "role": "user", "content": "My name is Alice."},
    {"type": "message", "role": "assistant", "content": "Hello Alice!"},
    {"type": "message", "role": "user", "content": "What is my name?"},
]
CITIES = ["Paris", "Rome"]
CITY = {"type": "object", "properties": {"city": {"type": "string", "enum": CITIES}}, "required": ["city"]}
SAMPLED = {
    "max_output_tokens": 300,
    "temperature": 1,
    "extra_body": {"seed": 7},
}  # the tiny model writes blanks without
FORCED: dict[str, Any] = (
    ASK
    | SAMPLED
    | {
        "tools": [{"type": "function", "name": "weather", "description": "The weather", "parameters": CITY}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
)


class Report(BaseModel):
    """What an answer must say."""

    city: Literal["Paris", "Rome"]


@pytest.fixture(params=("combined", "pair"))
def client(request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    url = request.getfixturevalue(request.param)
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300, _strict_response_validation=True
    ) as client:
        yield client


@pytest.mark.covers("B.clients.5")
@pytest.mark.parametrize(
    "body", [ASK, ASK | {"input": TURNS, "instructions": "Be brief."}, FORCED], ids=["text", "turns", "call"]
)
def test_a_streamed_response_equals_the_whole_one(client: Any, body: dict[str, Any]) -> None:
    whole = client.responses.create(**body)
    with client.responses.stream(**body) as stream:
        first, *_, last = stream  # get_final_response takes complete ones only
    streamed = last.response

    assert (first.type, last.type) == ("response.created", f"response.{whole.status}")
    assert [_shown(item) for item in streamed.output] == [_shown(item) for item in whole.output]
    assert (streamed.status, streamed.output_text) == (whole.status, whole.output_text)
    assert streamed.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.covers("B.clients.5")
def test_a_loop_of_calls_goes_on_with_their_results(client: Any) -> None:
    called = client.responses.create(**FORCED)
    thinking, call = called.output
    assert (thinking.type, call.type, call.name, json.loads(call.arguments)["city"] in CITIES) == (
        "reasoning",
        "function_call",
        "weather",
        True,
    )

    result = {"type": "function_call_output", "call_id": call.call_id, "output": "cold"}
    items = [{"role": "user", "content": "hello"}, *called.output, result]
    answer = client.responses.create(**FORCED | {"input": items, "tool_choice": "none"})

    assert answer.usage.output_tokens > 0


@pytest.mark.covers("B.clients.5")
def test_an_answer_is_parsed_as_its_class(client: Any) -> None:
    response = client.responses.parse(**ASK | SAMPLED, text_format=Report)

    assert response.output_parsed.city in CITIES


@pytest.mark.covers("B.clients.5")
def test_errors_have_the_clients_classes(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such"):
        client.responses.create(**ASK | {"model": "no-such"})
    with pytest.raises(openai.BadRequestError, match=r"input\.0\.content\.0"):
        client.responses.create(**ASK | {"input": [{"role": "user", "content": [{"type": "input_image"}]}]})


def _shown(item: Any) -> dict[str, Any]:
    """Return an item without what differs between two answers."""
    shown: dict[str, Any] = item.model_dump(exclude={"id", "call_id", "parsed_arguments"}, warnings=False)
    for part in shown.get("content", ()):
        part.pop("parsed", None)
    return shown
