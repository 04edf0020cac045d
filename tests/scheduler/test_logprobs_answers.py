"""Log probabilities, token ids and echoes in answers. The script gives each token a logprob of -id/100."""

import json
from typing import Any

import pytest

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_renderer")]

CHAT = [{"role": "user", "content": "hello"}]


def chunks(text: str) -> list[Any]:
    """Return the events of a stream without [DONE]."""
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line and "[DONE]" not in line]


@pytest.mark.covers("B.logprobs.2")
async def test_a_completion_has_tokens_offsets_and_top_logprobs(serve: Any) -> None:
    async with serve("hello world") as served:
        body = {"model": served.model, "prompt": "San", "logprobs": 2}
        choice = (await served.client.post("/v1/completions", json=body)).json()["choices"][0]

        ids, reported = served.ids("hello world"), choice["logprobs"]
        assert "".join(reported["tokens"]) == choice["text"] == "hello world"
        assert reported["token_logprobs"] == pytest.approx([-token_id / 100 for token_id in ids])
        lengths = [len(token) for token in reported["tokens"]]
        assert reported["text_offset"] == [sum(lengths[:at]) for at in range(len(ids))]
        assert [len(best) for best in reported["top_logprobs"]] == [3] * len(ids)
        names = [served.context.tokens.decode([token_id]) for token_id in (1, 2)]
        assert reported["top_logprobs"][0] == pytest.approx({names[0]: -0.01, names[1]: -0.02, "hello": -ids[0] / 100})
        assert list(reported["top_logprobs"][0]) == ["hello", names[0], names[1]]


async def test_logprobs_0_returns_only_the_chosen_tokens(serve: Any) -> None:
    async with serve("hello") as served:
        body = {"model": served.model, "prompt": "San", "logprobs": 0}
        reported = (await served.client.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]

        assert reported["top_logprobs"] == [{"hello": reported["token_logprobs"][0]}]


@pytest.mark.covers("B.logprobs.2")
async def test_an_echo_with_logprobs_begins_with_null_and_the_prompts(serve: Any) -> None:
    async with serve("hello") as served:
        body = {"model": served.model, "prompt": "San Francisco", "logprobs": 1, "echo": True, "n": 2}
        choices = (await served.client.post("/v1/completions", json=body)).json()["choices"]

        prompt, output = served.ids("San Francisco"), served.ids("hello")
        for choice in choices:
            reported = choice["logprobs"]
            assert reported["token_logprobs"][0] is None
            assert reported["top_logprobs"][0] is None
            expected = [-token_id / 100 for token_id in (*prompt, *output)][1:]
            assert reported["token_logprobs"][1:] == pytest.approx(expected)
            assert "".join(reported["tokens"]) == choice["text"] == "San Franciscohello"
            assert reported["text_offset"][len(prompt)] == len("San Francisco")


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("skips", [False, True])
async def test_text_offset_indexes_the_text(serve: Any, as_ids: bool, skips: bool) -> None:
    async with serve("世界 hello<|endoftext|> é!") as served:
        text = "<|im_start|>San 世界 Francisco<|im_end|>"
        prompt = list(served.ids(text)) if as_ids else text
        body = {"model": served.model, "prompt": prompt, "logprobs": 0, "echo": True, "skip_special_tokens": skips}
        choice = (await served.client.post("/v1/completions", json=body | {"max_tokens": 99})).json()["choices"][0]

        reported, whole = choice["logprobs"], choice["text"]
        found = [
            (token, at)
            for token, at in zip(reported["tokens"], reported["text_offset"], strict=True)
            if "\ufffd" not in token
        ]
        hidden = {token for token, at in found if not whole.startswith(token, at)}
        assert hidden <= ({"<|im_start|>", "<|im_end|>", "<|endoftext|>"} if skips else set())
        assert reported["text_offset"] == sorted(reported["text_offset"])
        assert whole[reported["text_offset"][-1] :] == "!"


async def test_offsets_continue_across_the_chunks_of_a_stream(serve: Any) -> None:
    async with serve("hello world") as served:
        body = {"model": served.model, "prompt": "San", "logprobs": 1, "echo": True}
        whole = (await served.client.post("/v1/completions", json=body)).json()["choices"][0]
        stream = await served.client.post("/v1/completions", json=body | {"stream": True})

        parts = [chunk["choices"][0] for chunk in chunks(stream.text)]
        assert len(parts) > 1
        for key in ("text_offset", "tokens", "token_logprobs", "top_logprobs"):
            assert [item for part in parts for item in part["logprobs"][key]] == whole["logprobs"][key]
        assert "".join(part["text"] for part in parts) == whole["text"]


@pytest.mark.covers("B.logprobs.1")
@pytest.mark.parametrize("top", [None, 0, 2])
async def test_a_chat_has_tokens_bytes_and_top_logprobs(serve: Any, top: int | None) -> None:
    async with serve("世界 ok") as served:
        body = {"model": served.model, "messages": CHAT, "logprobs": True, "top_logprobs": top}
        answer = (await served.client.post("/v1/chat/completions", json=body)).json()
        stream = await served.client.post("/v1/chat/completions", json=body | {"stream": True})

        content = answer["choices"][0]["logprobs"]["content"]
        assert len(content) == answer["usage"]["completion_tokens"]
        assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "世界 ok"
        assert [len(entry["top_logprobs"]) for entry in content] == [top or 0] * len(content)
        if top:
            assert content[0]["top_logprobs"][1]["logprob"] == pytest.approx(-0.02)
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks(stream.text)]
        assert [entry for part in parts if part for entry in part["content"]] == content


async def test_a_chat_has_logprobs_only_on_request_and_top_needs_them(serve: Any) -> None:
    async with serve() as served:
        body = {"model": served.model, "messages": CHAT}
        for fields in ({}, {"logprobs": False}, {"logprobs": False, "top_logprobs": 0}, {"logprobs": None}):
            plain = await served.client.post("/v1/chat/completions", json=body | fields)
            assert plain.json()["choices"][0]["logprobs"] is None
        refused = await served.client.post("/v1/chat/completions", json=body | {"top_logprobs": 2})
        excess = await served.client.post("/v1/chat/completions", json=body | {"logprobs": True, "top_logprobs": 21})

        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top_logprobs")
        assert excess.status_code == 400
        assert "must be in [0, 20] (--max-logprobs)" in excess.json()["error"]["message"]


async def test_tokens_can_be_returned_as_ids(serve: Any) -> None:
    async with serve("hello") as served:
        fields = {"model": served.model, "return_tokens_as_token_ids": True}
        body = fields | {"prompt": "San", "logprobs": 1}
        completion = (await served.client.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
        chat = await served.client.post("/v1/chat/completions", json=fields | {"messages": CHAT, "logprobs": True})

        named = f"token_id:{served.ids('hello')[0]}"
        assert completion["tokens"] == [named]
        assert set(completion["top_logprobs"][0]) == {"token_id:1", named}
        assert chat.json()["choices"][0]["logprobs"]["content"][0]["token"] == named


async def test_prompt_logprobs_are_by_id_with_rank(serve: Any) -> None:
    async with serve("hello") as served:
        fields = {"model": served.model, "prompt_logprobs": 1}
        completion = await served.client.post("/v1/completions", json=fields | {"prompt": "San Francisco"})
        chat = await served.client.post("/v1/chat/completions", json=fields | {"messages": CHAT})

        ids = served.ids("San Francisco")
        reported = completion.json()["choices"][0]["prompt_logprobs"]
        assert len(reported) == len(ids)
        assert reported[0] is None
        assert reported[1][str(ids[1])]["logprob"] == pytest.approx(-ids[1] / 100)
        assert reported[1]["1"] == {
            "logprob": pytest.approx(-0.01), "rank": 1, "decoded_token": served.context.tokens.decode([1]),
        }  # fmt: skip
        assert len(chat.json()["prompt_logprobs"]) == chat.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "base", "top", "of_choice", "of_message"),
    [
        ("/v1/completions", {"prompt": "San"}, "", "prompt_logprobs prompt_token_ids token_ids", ""),
        (
            "/v1/chat/completions", {"messages": CHAT}, "prompt_logprobs prompt_token_ids prompt_text", "token_ids",
            "refusal annotations audio function_call reasoning",
        ),
    ],
)  # fmt: skip
async def test_keys_that_vllm_sends_as_null_are_null(
    serve: Any, path: str, base: Any, top: str, of_choice: str, of_message: str
) -> None:
    async with serve("hello") as served:
        answer = (await served.client.post(path, json=base)).json()

        choice, everywhere = answer["choices"][0], "service_tier system_fingerprint kv_transfer_params metrics"
        assert [answer[key] for key in f"{everywhere} ec_transfer_params {top}".split()] == [None] * (
            5 + len(top.split())
        )
        assert {choice[key] for key in f"logprobs routed_experts weight_versions {of_choice}".split()} == {None}
        assert {choice.get("message", {})[key] for key in of_message.split()} <= {None}
        assert answer["usage"]["prompt_tokens_details"] is None


async def test_token_ids_are_returned_on_request(serve: Any) -> None:
    async with serve("hello world") as served:
        fields = {"model": served.model, "return_token_ids": True}
        ids = list(served.ids("hello world"))
        whole = (await served.client.post("/v1/completions", json=fields | {"prompt": "San"})).json()["choices"][0]
        assert (whole["prompt_token_ids"], whole["token_ids"]) == (list(served.ids("San")), ids)

        stream = await served.client.post("/v1/completions", json=fields | {"prompt": "San", "stream": True})
        parts = [chunk["choices"][0] for chunk in chunks(stream.text)]
        assert parts[0]["prompt_token_ids"] == list(served.ids("San"))
        assert all("prompt_token_ids" not in part for part in parts[1:])
        assert [token_id for part in parts for token_id in part["token_ids"]] == ids

        chat = (await served.client.post("/v1/chat/completions", json=fields | {"messages": CHAT})).json()
        assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
        assert chat["choices"][0]["token_ids"] == ids
