"""What a stream carries beside the text: usage, roles, echoes."""

import asyncio
import json
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_renderer")]

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
SURFACES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "San Francisco is a"}),
    ("/v1/chat/completions", CHAT),
]


def events(response: httpx.Response) -> list[Any]:
    """Return the events of a stream; it ends with [DONE], once."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.count("[DONE]") == 1
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize(("path", "base"), SURFACES)
async def test_usage_is_sent_only_on_request(serve: Any, path: str, base: Any) -> None:
    async with serve("hello world") as served:
        body = {"model": served.model, "stream": True, "n": 2} | base

        async def stream(**options: bool) -> list[Any]:
            fields = {"stream_options": options} if options else {}
            return events(await served.client.post(path, json=body | fields))

        plain, none = await stream(), await stream(include_usage=False)
        assert not any("usage" in chunk for chunk in plain + none)

        *chunks, last = await stream(include_usage=True)
        assert not any("usage" in chunk for chunk in chunks)
        assert last["choices"] == []
        total = last["usage"]["completion_tokens"]
        assert total == 2 * len(served.ids("hello world"))

        *chunks, last = await stream(include_usage=True, continuous_usage_stats=True)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == last["usage"]["completion_tokens"] == total
        assert all(chunk["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"] for chunk in chunks)
        if "messages" in base:  # the chunks that name the role
            assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks[:2]] == ["assistant"] * 2
            assert counts[:2] == [0, 0]
            assert chunks[0]["usage"]["total_tokens"] == last["usage"]["prompt_tokens"]

        assert not any("usage" in chunk for chunk in await stream(continuous_usage_stats=True))


@pytest.mark.parametrize(("path", "base"), SURFACES)
async def test_usage_names_instances_only_where_requested(serve: Any, path: str, base: Any) -> None:
    async with serve("hello world") as served:
        for options, shown in (({}, False), ({"include_instances": True}, True)):
            body = {"model": served.model, "stream": True, "stream_options": {"include_usage": True} | options}
            reported = events(await served.client.post(path, json=body | base))[-1]["pdserve"]

            assert reported["path"] == "handoff"
            assert ("prefill_instance" in reported, "decode_instance" in reported) == (shown, shown)


@pytest.mark.covers("B.usage.5")
async def test_an_operator_can_force_usage_with_details(serve: Any) -> None:
    async with serve("hello", enable_force_include_usage=True, enable_prompt_tokens_details=True) as served:
        body = {"model": served.model, "prompt": "San"}
        *chunks, last = events(await served.client.post("/v1/completions", json=body | {"stream": True}))
        whole = (await served.client.post("/v1/completions", json=body)).json()

        assert last["usage"] == whole["usage"]
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [*range(1, len(chunks) + 1)]
        assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "created_cache_tokens": 0}


@pytest.mark.parametrize(("path", "base"), SURFACES)
async def test_every_choice_ends_once_with_its_last_text(serve: Any, path: str, base: Any) -> None:
    async with serve("hello world") as served:
        body = {"model": served.model, "stream": True, "n": 3, "seed": 1} | base
        chunks = events(await served.client.post(path, json=body))

        heads = {(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}
        assert len(heads) == 1
        for index in range(3):
            own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
            assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]
            assert own[-1].get("text") or own[-1]["delta"]["content"]
            if "delta" in own[0]:
                assert own[0]["delta"] == {"role": "assistant", "content": ""}
                assert all("role" not in choice["delta"] for choice in own[1:])


async def test_the_chunks_of_any_text_join_to_it(serve: Any) -> None:
    text = 'quote " back \\ slash / \u2028 \x01 é 世界 🎉 </script>'
    async with serve(text) as served:
        for path, base in SURFACES:
            body = {"model": served.model, "max_tokens": 200} | base
            whole = (await served.client.post(path, json=body)).json()["choices"][0]
            chunks = events(await served.client.post(path, json=body | {"stream": True}))
            parts = [chunk["choices"][0] for chunk in chunks]

            assert (whole.get("text") or whole["message"]["content"]) == text
            assert "".join(part.get("text", "") or part.get("delta", {}).get("content", "") for part in parts) == text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_echoes_the_last_message_of_the_same_role(serve: Any, stream: bool) -> None:
    messages = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one two"}]
    async with serve(" three") as served:
        body = {"model": served.model, "messages": messages, "echo": True, "stream": stream}
        going_on = {"continue_final_message": True, "add_generation_prompt": False}

        async def text(**fields: Any) -> str:
            response = await served.client.post("/v1/chat/completions", json=body | fields)
            if not stream:
                return str(response.json()["choices"][0]["message"]["content"])
            return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in events(response))

        assert await text(**going_on) == "one two three"
        assert await text(echo=False, **going_on) == " three"
        assert await text(messages=messages[:1]) == " three"


async def test_continue_final_message_continues_without_a_new_turn(serve: Any) -> None:
    messages = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one two"}]
    async with serve() as served:
        body = {"model": served.model, "messages": messages}
        both = {"continue_final_message": True, "add_generation_prompt": True}
        await served.client.post("/v1/chat/completions", json=body | {"continue_final_message": True})
        refused = await served.client.post("/v1/chat/completions", json=body | both)

        prompt = served.context.tokens.decode(served.dispatcher.requests[0].prompts[0], skip_special_tokens=False)
        assert prompt.endswith("<|im_start|>assistant\none two")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "continue_final_message")


async def test_the_role_of_answers_is_configured_by_the_operator(serve: Any) -> None:
    async with serve(response_role="bot") as served:
        answer = await served.client.post("/v1/chat/completions", json={"model": served.model} | CHAT)
        unprompted = await served.client.post(
            "/v1/chat/completions", json={"model": served.model, "add_generation_prompt": False} | CHAT
        )

        assert answer.json()["choices"][0]["message"]["role"] == "bot"
        assert unprompted.json()["choices"][0]["message"]["role"] == "user"


async def test_the_clients_request_id_ends_the_answers_id(serve: Any) -> None:
    async with serve() as served:
        for path, base in SURFACES:
            body = {"model": served.model} | base
            given = await served.client.post(path, json=body, headers={"X-Request-Id": "my-1"})
            own = await served.client.post(path, json=body)

            kind = "chatcmpl" if "chat" in path else "cmpl"
            assert given.json()["id"] == f"{kind}-my-1"
            assert own.json()["id"] == served.dispatcher.requests[-1].request_id
        assert not any("my-1" in request.request_id for request in served.dispatcher.requests)


async def test_equal_request_ids_at_once_get_ids_of_their_own(serve: Any) -> None:
    async with serve() as served:
        body, headers = {"model": served.model, "prompt": "hi"}, {"X-Request-Id": "my-1"}
        answers = await asyncio.gather(
            *(served.client.post("/v1/completions", json=body, headers=headers) for _ in range(3))
        )
        later = await served.client.post("/v1/completions", json=body, headers=headers)

        assert len({answer.json()["id"] for answer in answers}) == 3
        assert {answer.headers["x-request-id"] for answer in answers} == {"my-1"}
        assert later.json()["id"] == "cmpl-my-1"
