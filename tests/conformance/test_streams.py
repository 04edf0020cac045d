"""The parts of a stream, on completions and chats, combined and over P/D."""

from typing import Any

import pytest

from tests.conformance.served import CHAT, PROMPT, Served, events

pytestmark = pytest.mark.cluster

BODIES: dict[str, dict[str, Any]] = {"/v1/completions": {"prompt": PROMPT}, "/v1/chat/completions": {"messages": CHAT}}


def streamed(served: Served, path: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the chunks of a stream of two choices."""
    body = BODIES[path] | {"n": 2, "seed": 5, "max_tokens": 9, "stream": True} | fields
    return events(served.post(path, **body))


@pytest.mark.covers("B.stream.1", "B.stream.2", "B.stream.3", "B.stream.4", "B.stream.5")
@pytest.mark.parametrize("path", BODIES)
def test_each_choice_opens_once_and_ends_once(served: Served, path: str) -> None:
    chunks = streamed(served, path, ignore_eos=True)

    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert {key for chunk in chunks for key in chunk} == {"id", "object", "created", "model", "choices"}
    for index in (0, 1):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]
        if "chat" in path:
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            assert all("role" not in choice["delta"] for choice in own[1:])
            assert own[-1]["delta"].get("content") is not None


@pytest.mark.covers("B.usage.1", "B.usage.2", "B.usage.3", "B.usage.4")
@pytest.mark.parametrize("path", BODIES)
def test_usage_is_sent_only_as_requested(served: Served, path: str) -> None:
    for options in (None, {"include_usage": False}, {}):
        assert not any("usage" in chunk for chunk in streamed(served, path, stream_options=options))

    *chunks, last = streamed(served, path, stream_options={"include_usage": True})
    assert (last["choices"], any("usage" in chunk for chunk in chunks)) == ([], False)
    plain = served.post(path, **BODIES[path], n=2, seed=5, max_tokens=9).json()["usage"]
    assert {key: last["usage"][key] for key in plain if "token" in key and "details" not in key} == {
        key: plain[key] for key in plain if "details" not in key
    }

    *chunks, last = streamed(served, path, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"]

    alone = streamed(served, path, stream_options={"continuous_usage_stats": True})
    assert not any("usage" in chunk for chunk in alone)
    assert served.refused(path, **BODIES[path], stream_options={"include_usage": True})["param"] == "stream_options"


@pytest.mark.covers("B.logprobs.4")
def test_offsets_continue_across_chunks(served: Served) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 1}
    whole = served.completion(**fields)["choices"][0]["logprobs"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in events(served.post("/v1/completions", stream=True, **fields))]

    assert len(parts) > 1
    for key in ("text_offset", "tokens"):
        assert [item for part in parts for item in part[key]] == whole[key]


@pytest.mark.covers("B.logprobs.5")
def test_tokens_are_returned_as_numbers_where_requested(served: Served) -> None:
    fields = {"logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = served.completion(**fields)["choices"][0]
    chunks = events(served.post("/v1/completions", prompt=PROMPT, max_tokens=8, temperature=0, stream=True, **fields))

    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == choice["prompt_token_ids"]
    assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]] == choice["token_ids"]
