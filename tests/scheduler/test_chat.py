"""POST /v1/chat/completions over a scripted dispatcher."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_renderer")]

GUIDE = """{ "model": "${container_model_path}", "messages": [ { "role": "user", "content": "hello" } ],
"max_tokens": 100, "top_k": -1, "top_p": 1, "temperature": 0, "ignore_eos": false, "stream": false }"""
HELLO = [{"role": "user", "content": "hello"}]


def events(text: str) -> list[Any]:
    """Return the events of a stream, [DONE] as text."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def test_the_guides_request_is_served_verbatim(serve: Any) -> None:
    async with serve("hello there") as served:
        body = GUIDE.replace("${container_model_path}", served.model)
        response = await served.client.post(
            "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
        )

        answer = response.json()
        assert response.status_code == 200
        assert answer["object"] == "chat.completion"
        assert answer["id"].startswith("chatcmpl-")
        message = answer["choices"][0]["message"]
        assert (message["role"], message["content"]) == ("assistant", "hello there")
        assert served.dispatcher.requests[0].params.temperature == 0


async def test_the_prompt_is_rendered_by_the_models_template(serve: Any) -> None:
    parts = [{"type": "text", "text": "hi"}]
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": parts}]
    async with serve() as served:
        await served.client.post("/v1/chat/completions", json={"model": served.model, "messages": messages})
        await served.client.post(
            "/v1/chat/completions",
            json={"model": served.model, "messages": messages, "add_generation_prompt": False},
        )

        tokenizer = Tokenizer.from_file(f"{served.model}/tokenizer.json")
        rendered = "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        with_header, without = (request.prompts[0] for request in served.dispatcher.requests)
        assert list(with_header) == tokenizer.encode(rendered + "<|im_start|>assistant\n").ids
        assert list(without) == tokenizer.encode(rendered).ids


async def test_a_refusal_part_is_text(serve: Any) -> None:
    async with serve() as served:
        for part in ({"type": "refusal", "refusal": "no"}, {"type": "text", "text": "no"}):
            messages = [*HELLO, {"role": "assistant", "content": [part]}, *HELLO]
            await served.client.post("/v1/chat/completions", json={"messages": messages})

        refused, accepted = served.dispatcher.requests
        assert refused.prompts == accepted.prompts


async def test_max_tokens_defaults_to_the_context_left(serve: Any) -> None:
    async with serve() as served:
        await served.client.post("/v1/chat/completions", json={"model": served.model, "messages": HELLO})

        request = served.dispatcher.requests[0]
        assert request.params.max_tokens == 512 - len(request.prompts[0])
        assert 0 <= request.params.seed < 2**63


async def test_max_completion_tokens_overrides_max_tokens(serve: Any) -> None:
    body = {"messages": HELLO, "max_tokens": 9, "max_completion_tokens": 3}
    async with serve() as served:
        await served.client.post("/v1/chat/completions", json=body | {"model": served.model})

        assert served.dispatcher.requests[0].params.max_tokens == 3


async def test_a_stream_opens_a_choice_with_its_role_and_ends_it(
    serve: Any,
) -> None:
    body = {"messages": HELLO, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    async with serve("hello 你好") as served:
        response = await served.client.post("/v1/chat/completions", json=body | {"model": served.model})

        *chunks, usage, done = events(response.text)
        for index in (0, 1):
            own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(choice["delta"].get("content", "") for choice in own) == "hello 你好"
            assert [choice["finish_reason"] for choice in own].count("length") == 1
            assert own[-1]["delta"] == {"content": "好"}
            assert own[-1]["finish_reason"] == "length"
        assert done == "[DONE]"
        assert usage["pdserve"]["stages_ms"]["prefill"] == 100
        assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + usage["usage"]["completion_tokens"]
        assert {(chunk["id"], chunk["created"], chunk["object"]) for chunk in [*chunks, usage]} == {
            (usage["id"], usage["created"], "chat.completion.chunk")
        }


async def test_without_include_usage_no_chunk_has_usage(serve: Any) -> None:
    async with serve() as served:
        response = await served.client.post(
            "/v1/chat/completions", json={"model": served.model, "messages": HELLO, "stream": True}
        )

        assert '"usage"' not in response.text
        assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.covers("A5.75")
async def test_a_model_without_a_template_serves_completions_only(serve: Any, make_model: Any) -> None:
    folder = make_model(chat_template=None)
    async with serve(folder=folder) as served:
        chat = await served.client.post("/v1/chat/completions", json={"model": str(folder), "messages": HELLO})
        completion = await served.client.post("/v1/completions", json={"model": str(folder), "prompt": "hi"})

        assert (chat.status_code, completion.status_code) == (400, 200)
        assert "no chat template" in chat.json()["error"]["message"]


async def test_a_template_may_refuse_the_messages_with_its_own_text(serve: Any, make_model: Any) -> None:
    folder = make_model(chat_template="{{ raise_exception('roles must alternate') }}")
    async with serve(folder=folder) as served:
        response = await served.client.post("/v1/chat/completions", json={"model": str(folder), "messages": HELLO})

        assert response.status_code == 400
        assert "roles must alternate" in response.json()["error"]["message"]


async def test_unknown_fields_are_ignored_and_neutral_values_pass(serve: Any) -> None:
    neutral = {
        "tools": None, "tool_choice": "none", "logprobs": False, "top_logprobs": 0, "best_of": 1, "stop": None,
        "use_beam_search": False, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
        "logit_bias": {}, "response_format": {"type": "text"}, "guided_json": None, "user": "someone",
        "some_new_field": {"a": [1]}, "temperature": None, "n": None, "seed": -1, "top_k": 0, "store": True,
    }  # fmt: skip
    async with serve() as served:
        response = await served.client.post(
            "/v1/chat/completions", json=neutral | {"model": served.model, "messages": HELLO}
        )

        assert response.status_code == 200, response.text


async def test_default_max_tokens_is_what_model_and_pool_hold(serve: Any) -> None:
    async with serve(maximum=40) as served:
        for maximum in (None, 50):
            body = {"model": served.model, "messages": HELLO, "max_tokens": maximum}
            await served.client.post("/v1/chat/completions", json=body)
    async with serve() as unbounded:
        await unbounded.client.post("/v1/chat/completions", json={"model": unbounded.model, "messages": HELLO})

    assert [request.params.max_tokens for request in served.dispatcher.requests] == [40, 50]
    (request,) = unbounded.dispatcher.requests
    assert request.params.max_tokens == 512 - len(request.prompts[0])
