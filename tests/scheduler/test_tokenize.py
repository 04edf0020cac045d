"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from typing import Any

import pytest

from tests.scheduler.conftest import CHATML, Served

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_renderer")]

HELLO = [{"role": "user", "content": "hello"}]


async def post(served: Served, path: str, body: Any) -> Any:
    """Return the body of a successful answer."""
    response = await served.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_text_is_tokenised_to_ids(serve: Any) -> None:
    async with serve() as served:
        answer = await post(served, "/tokenize", {"model": served.model, "prompt": "hello world"})

        ids = served.ids("hello world")
        assert answer == {"count": len(ids), "max_model_len": 512, "tokens": list(ids), "token_strs": None}


async def test_token_strs_are_those_of_the_vocabulary(serve: Any) -> None:
    async with serve() as served:
        answer = await post(served, "/tokenize", {"prompt": " hello <|im_end|>", "return_token_strs": True})

        spelled = "".join(answer["token_strs"])
        assert len(answer["token_strs"]) == answer["count"]
        assert spelled == "ĠhelloĠ<|im_end|>"


@pytest.mark.covers("B.tokenizer.4")
@pytest.mark.parametrize(("add_special_tokens", "more"), [(None, 1), (True, 1), (False, 0)])
async def test_special_tokens_are_added_unless_disabled(
    serve: Any, make_model: Any, add_special_tokens: bool | None, more: int
) -> None:
    async with serve(folder=make_model(add_bos_token=True)) as served:
        answer = await post(served, "/tokenize", {"prompt": "hello", "add_special_tokens": add_special_tokens})

        assert answer["count"] == len(served.ids("hello")) + more


@pytest.mark.covers("B.tokenizer.4")
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, "<|im_start|>user\nhello<|im_end|>\n"),
        ({"chat_template": "{{ messages[0].content }} {{ who }}", "chat_template_kwargs": {"who": "fox"}}, "hello fox"),
        ({"continue_final_message": True}, "<|im_start|>user\nhello"),
    ],
)
async def test_a_conversation_is_tokenised_by_its_template(serve: Any, fields: Any, text: str) -> None:
    async with serve() as served:
        answer = await post(served, "/tokenize", {"messages": HELLO} | fields)

        assert answer["tokens"] == list(served.ids(text))


async def test_tokenize_returns_the_ids_that_chat_uses(serve: Any) -> None:
    async with serve() as served:
        answer = await post(served, "/tokenize", {"messages": HELLO})
        chat = {"model": served.model, "messages": HELLO, "max_tokens": 1}
        usage = (await post(served, "/v1/chat/completions", chat))["usage"]

        assert served.dispatcher.requests[0].prompts == (tuple(answer["tokens"]),)
        assert usage["prompt_tokens"] == answer["count"]


@pytest.mark.parametrize("text", ["hello world", "好 morning", "<|im_start|>user"])
async def test_detokenize_returns_the_tokenized_text(serve: Any, text: str) -> None:
    async with serve() as served:
        tokens = (await post(served, "/tokenize", {"prompt": text}))["tokens"]

        assert await post(served, "/detokenize", {"model": served.model, "tokens": tokens}) == {"prompt": text}


async def test_no_tokens_are_an_empty_text(serve: Any) -> None:
    async with serve() as served:
        assert await post(served, "/detokenize", {"tokens": []}) == {"prompt": ""}


async def test_many_tokens_are_one_text(serve: Any) -> None:
    async with serve() as served:
        ids = list(served.ids("hello")) * 3000

        assert await post(served, "/detokenize", {"tokens": ids}) == {"prompt": "hello" * 3000}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"model": "other", "prompt": "a"}, 404, "model"),
        ("/tokenize", {"prompt": "a" * 20_000}, 400, "prompt"),
        ("/tokenize", {"messages": HELLO, "tools": [{"type": "function"}]}, 400, "tools.0.function"),
        (
            "/tokenize",
            {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
            400,
            "continue_final_message",
        ),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [1, -1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [384]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1] * (2**20 + 1)}, 400, "tokens"),
        ("/detokenize", {"model": "other", "tokens": [1]}, 404, "model"),
    ],
)
async def test_invalid_fields_are_refused_by_name(serve: Any, path: str, body: Any, status: int, param: str) -> None:
    async with serve() as served:
        response = await served.client.post(path, json=body)

        assert (response.status_code, response.json()["error"]["param"]) == (status, param)


@pytest.mark.covers("B.tokenizer.5")
async def test_tokenizer_info_is_served_by_flag_alone(serve: Any) -> None:
    async with serve() as served:
        assert (await served.client.get("/tokenizer_info")).status_code == 404

    async with serve(enable_tokenizer_info_endpoint=True) as served:
        info = (await served.client.get("/tokenizer_info")).json()

        reported = {name: info[name] for name in ("bos_token", "eos_token", "chat_template", "vocab_size")}
        assert reported == {
            "bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": CHATML, "vocab_size": 384,
        }  # fmt: skip
