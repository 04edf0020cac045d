"""--max-answer-bytes: the memory that one request may take, checked before it is computed and while it runs."""

import json
from typing import Any

import httpx
import pytest

from scheduler.config import SchedulerOptions

pytestmark = pytest.mark.anyio

SURFACES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "San Francisco is a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}
TEXT = "the quick brown fox " * 20
LOGPROBS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"logprobs": 5}, "/v1/chat/completions": {"logprobs": True, "top_logprobs": 5},
}  # fmt: skip


async def post(served: Any, path: str, **fields: Any) -> httpx.Response:
    body = {"model": served.model, "max_tokens": 400, "seed": 1} | SURFACES[path] | fields
    response: httpx.Response = await served.client.post(path, json=body)
    return response


@pytest.mark.parametrize("path", SURFACES)
async def test_an_answer_is_sent_whole_up_to_the_limit_and_streamed_beyond(serve: Any, path: str) -> None:
    async with serve(TEXT) as served:
        whole = await post(served, path, **LOGPROBS[path])
    size = len(json.dumps(whole.json()["choices"], ensure_ascii=False, separators=(",", ":")).encode())
    async with serve(TEXT, max_answer_bytes=size) as served:
        assert (await post(served, path, **LOGPROBS[path])).json()["choices"] == whole.json()["choices"]
    async with serve(TEXT, max_answer_bytes=size * 3 // 4) as served:
        refused = await post(served, path, **LOGPROBS[path])
        streamed = await post(served, path, stream=True, **LOGPROBS[path])

        assert refused.status_code == 400
        assert f"larger than {size * 3 // 4} bytes (--max-answer-bytes)" in refused.json()["error"]["message"]
        assert served.dispatcher.outcomes[0] == "failed"
        assert streamed.text.endswith("data: [DONE]\n\n")


async def test_text_and_ids_count_too(serve: Any) -> None:
    async with serve(TEXT, max_answer_bytes=600) as served:
        assert (await post(served, "/v1/completions")).status_code == 200
        assert (await post(served, "/v1/completions", return_token_ids=True)).status_code == 400
        assert (await post(served, "/v1/completions", n=2)).status_code == 400
        assert (await post(served, "/v1/completions", echo=True, prompt="x" * 300)).status_code == 400


@pytest.mark.parametrize(("below", "status"), [(0, 200), (1, 400)])
async def test_the_last_piece_counts_too(serve: Any, below: int, status: int) -> None:
    async with serve(TEXT, max_answer_bytes=len(TEXT) - below) as served:
        assert (await post(served, "/v1/completions")).status_code == status


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [[5] * 100] * 4, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt": [5] * 100, "n": 4, "echo": True, "logprobs": 20, "stream": True}, "logprobs"),
        ({"prompt": [[5] * 400] * 32, "return_token_ids": True, "max_tokens": 9}, "return_token_ids"),
        ({"best_of": 8, "logprobs": 20, "max_tokens": 100}, "best_of"),
        ({"use_beam_search": True, "n": 8, "logprobs": 20, "max_tokens": 100}, "logprobs"),
        ({"use_beam_search": True, "best_of": 8, "logprobs": 20, "max_tokens": 100}, "logprobs"),
        ({"best_of": 8, "logprobs": 0, "logprob_token_ids": [*range(20)], "max_tokens": 20}, "best_of"),
    ],
)
async def test_an_answer_known_to_be_too_long_is_refused_first(serve: Any, fields: dict[str, Any], param: str) -> None:
    async with serve(max_answer_bytes=65536) as served:
        refused = await post(served, "/v1/completions", **fields)

        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
        assert "but the limit is 65536 (--max-answer-bytes)" in refused.json()["error"]["message"]
        assert served.dispatcher.requests == []


@pytest.mark.parametrize("path", SURFACES)
async def test_a_collected_answer_equals_its_stream(serve: Any, path: str) -> None:
    fields = {**LOGPROBS[path], "return_token_ids": True, "max_tokens": 12, "n": 2}
    async with serve("世界 hello world") as served:
        whole = (await post(served, path, **fields)).json()["choices"]
        chunks = (await post(served, path, stream=True, **fields)).text.split("\n\n")[:-2]

        parts = [choice for line in chunks for choice in json.loads(line[6:])["choices"]]
        for choice in whole:
            own = [part for part in parts if part["index"] == choice["index"]]
            assert [i for part in own for i in part.get("token_ids", ())] == choice["token_ids"]
            for name, values in choice["logprobs"].items():
                assert [one for part in own if part["logprobs"] for one in part["logprobs"][name]] == values


async def test_vectors_are_bounded_too(serve: Any) -> None:
    async with serve(max_answer_bytes=600) as served:
        body = {"model": served.model, "input": ["a"]}
        few = await served.client.post("/v1/embeddings", json=body)
        many = await served.client.post("/v1/embeddings", json=body | {"input": ["a"] * 20})

        assert few.status_code == 200, few.text
        assert (many.status_code, many.json()["error"]["param"]) == (400, "input")
        assert "20 vectors take more than 600 bytes (--max-answer-bytes)" in many.json()["error"]["message"]


def test_the_default_is_64_mib() -> None:
    assert SchedulerOptions().max_answer_bytes == 64 * 2**20
