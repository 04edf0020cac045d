"""anthropic (Python): messages, streams, loops of tools and errors; it validates each answer and each event."""

from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.long]

anthropic = pytest.importorskip("anthropic", reason="missing tool: anthropic (pip install 'pdserve[clients]')")

ASK: dict[str, Any] = {
    "model": "tiny", "max_tokens": 64, "messages": [{"role": "user", "content": "hello"}],
    "extra_body": {"temperature": 0},
}  # fmt: skip
CITIES = ["Paris", "Rome"]
CITY = {"type": "object", "properties": {"city": {"type": "string", "enum": CITIES}}, "required": ["city"]}
FORCED: dict[str, Any] = ASK | {
    "max_tokens": 300,
    "extra_body": {"temperature": 1, "seed": 7},
    "tools": [{"name": "weather", "description": "The weather", "input_schema": CITY}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}


@pytest.fixture(params=("combined", "pair"))
def client(request: pytest.FixtureRequest) -> Iterator[Any]:
    url = request.getfixturevalue(request.param)
    with anthropic.Anthropic(
        base_url=url, api_key="none", max_retries=0, timeout=300, _strict_response_validation=True
    ) as client:
        yield client


@pytest.mark.covers("B.clients.4")
@pytest.mark.parametrize("body", [ASK, ASK | {"system": "Be brief.", "stop_sequences": ["e"]}, FORCED])
def test_a_streamed_message_equals_the_whole_one(client: Any, body: dict[str, Any]) -> None:
    whole = client.messages.create(**body)
    with client.messages.stream(**body) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()

    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.stop_sequence == whole.stop_sequence
    assert [_shown(block) for block in streamed.content] == [_shown(block) for block in whole.content]
    assert _num_input(streamed.usage) == _num_input(whole.usage) == _counted(client, body)
    assert streamed.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.covers("B.clients.4")
def test_a_loop_of_calls_goes_on_with_their_results(client: Any) -> None:
    called = client.messages.create(**FORCED)
    thinking, call = called.content
    assert (thinking.type, call.type) == ("thinking", "tool_use")
    assert (called.stop_reason, call.input["city"] in CITIES) == ("tool_use", True)

    result = {"type": "tool_result", "tool_use_id": call.id, "content": "cold"}
    turns = [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(**FORCED | {"messages": ASK["messages"] + turns, "tool_choice": {"type": "none"}})

    assert answer.usage.output_tokens > 0


@pytest.mark.covers("B.clients.4")
def test_models_are_listed_and_shown(client: Any) -> None:
    (listed,) = client.models.list()

    assert client.models.retrieve("tiny") == listed
    assert (listed.id, listed.display_name, listed.lifecycle) == ("tiny", "tiny", "active")


@pytest.mark.covers("B.clients.4")
def test_errors_have_the_clients_classes(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="no-such") as unknown:
        client.messages.create(**ASK | {"model": "no-such"})
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0"):
        client.messages.create(**ASK | {"messages": [{"role": "user", "content": [{"type": "image"}]}]})

    assert unknown.value.request_id == unknown.value.response.headers["x-request-id"]


def _shown(block: Any) -> dict[str, Any]:
    """Return a block without what differs between two answers."""
    shown: dict[str, Any] = block.model_dump(exclude={"id", "signature"})
    return {name: value for name, value in shown.items() if value is not None and name != "parsed_output"}


def _num_input(usage: Any) -> Any:
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)


def _counted(client: Any, body: dict[str, Any]) -> Any:
    fields = ("model", "messages", "system", "tools", "tool_choice")
    return client.messages.count_tokens(**{name: body[name] for name in fields if name in body}).input_tokens
