"""USE_OPENAI=0: POST /generate in the format of vLLM's first server, over a scripted dispatcher."""

import asyncio
import itertools
import json
from typing import Any

import pytest

from scheduler.request import GenerationRequest
from testing.scheduler.scripted_dispatcher import Line
from tests.scheduler.conftest import Served
from wire.errors import InternalError
from wire.types import FinishReason

pytestmark = pytest.mark.anyio

OLD = {"use_openai": "0"}


async def post(served: Served, **body: Any) -> Any:
    """Return the body of a successful answer."""
    response = await served.client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def frames(text: str) -> list[dict[str, Any]]:
    """Return the frames of a stream, each terminated by a NUL byte."""
    *whole, rest = text.split("\0")
    assert rest == ""
    return [json.loads(frame) for frame in whole]


@pytest.mark.parametrize(("origin", "status"), [({}, 200), ({"origin": "https://evil.example"}, 415)])
async def test_curl_needs_no_header_and_web_pages_cannot_bypass_cors(
    serve: Any, origin: dict[str, str], status: int
) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    async with serve("hello", **OLD) as served:
        answer = await served.client.post("/generate", content=b'{"prompt": "hi"}', headers=form | origin)

        assert answer.status_code == status, answer.text


@pytest.mark.covers("A8.105")
async def test_the_text_follows_its_prompt(serve: Any) -> None:
    async with serve(" good morning", **OLD) as served:
        answer = await post(served, prompt="hello", max_tokens=len(served.ids(" good morning")))

        assert answer == {"text": ["hello good morning"]}
        assert served.dispatcher.requests[0].prompts == (served.ids("hello"),)


@pytest.mark.covers("A8.105")
async def test_every_choice_has_a_text(serve: Any) -> None:
    def script(request: GenerationRequest, prompt: int, sequence: int) -> Line:
        return Line(texts[sequence])

    async with serve(script, **OLD) as served:
        texts = [served.ids(" world"), served.ids(" good")]
        answer = await post(served, prompt="hello", n=2, temperature=0.8, max_tokens=max(map(len, texts)))

        assert answer == {"text": ["hello world", "hello good"]}


@pytest.mark.covers("A8.105")
async def test_each_frame_of_a_stream_has_all_the_text_so_far(serve: Any) -> None:
    async with serve(" 你好 world", **OLD) as served:
        body = {"prompt": "hello", "n": 2, "stream": True, "max_tokens": len(served.ids(" 你好 world"))}
        response = await served.client.post("/generate", json=body)

        reported = frames(response.text)
        assert response.status_code == 200
        assert reported[-1] == {"text": ["hello 你好 world"] * 2}
        assert len(reported) > 2
        for before, after in itertools.pairwise(reported):
            assert all(new.startswith(old) for old, new in zip(before["text"], after["text"], strict=True))
        assert all(text.startswith("hello") for frame in reported for text in frame["text"])


@pytest.mark.covers("A8.105")
async def test_sampling_parameters_reach_the_request(serve: Any) -> None:
    async with serve("a", **OLD) as served:
        await post(served, prompt="hello", temperature=0.5, top_k=7, top_p=0.9, presence_penalty=1.0, seed=4)
        await post(served, prompt="hello", use_beam_search=True, best_of=3, temperature=0, logprobs=2, detokenize=True)
        await post(served, prompt=list(served.ids("hello")), max_tokens=1)

        first, second, third = (request.params for request in served.dispatcher.requests)
        assert (first.temperature, first.top_k, first.top_p, first.presence_penalty, first.seed) == (0.5, 7, 0.9, 1, 4)
        assert first.max_tokens == 16
        assert second.beam_search is not None
        assert third.max_tokens == 1


@pytest.mark.covers("A8.106")
async def test_the_openai_routes_do_not_exist(serve: Any) -> None:
    async with serve(**OLD) as served:
        for method, path in (
            ("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"),
            ("POST", "/v1/embeddings"), ("POST", "/tokenize"),
        ):  # fmt: skip
            response = await served.client.request(method, path, json={})
            assert (response.status_code, response.json()["error"]["code"]) == (404, 404)
        assert (await served.client.get("/health")).status_code == 200
        assert "/generate" in (await served.client.get("/openapi.json")).json()["paths"]

    async with serve() as served:
        assert (await served.client.post("/generate", json={"prompt": "a"})).status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": ["a", "b"]}, 400, "prompt"),
        ({"prompt": "a", "temprature": 1}, 400, "temprature"),
        ({"prompt": "a", "top_p": 0}, 400, "top_p"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "a", "n": 2, "temperature": 0}, 400, "n"),
        ({"prompt": "a", "detokenize": False}, 400, "detokenize"),
        ({"prompt": "a", "ticket": "x"}, 400, "ticket"),
        ({"prompt": "a", "stream": True, "use_beam_search": True, "best_of": 2, "temperature": 0}, 400, "stream"),
        ({"prompt": "a", "model": "other"}, 404, "model"),
    ],
)
async def test_invalid_fields_are_refused_by_name(serve: Any, body: Any, status: int, param: str) -> None:
    async with serve(**OLD) as served:
        response = await served.client.post("/generate", json=body)

        assert (response.status_code, response.json()["error"]["param"]) == (status, param)
        assert not served.dispatcher.requests


async def test_an_error_in_mid_stream_is_the_last_frame(serve: Any) -> None:
    async with serve("hello world", **OLD) as served:
        served.dispatcher.fail_after, served.dispatcher.error = 1, InternalError("broken")
        response = await served.client.post("/generate", json={"prompt": "hello", "stream": True})

        *texts, error = frames(response.text)
        assert all(set(frame) == {"text"} for frame in texts)
        assert error["error"]["code"] == 500


async def test_an_error_before_the_first_text_is_an_http_status(serve: Any) -> None:
    async with serve(**OLD) as served:
        served.dispatcher.fail_after, served.dispatcher.error = 0, InternalError("broken")
        response = await served.client.post("/generate", json={"prompt": "hello", "stream": True})

        assert response.status_code == 500


@pytest.mark.covers("A8.105")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_cancels_its_request(serve: Any, stream: bool) -> None:
    async with serve("hello world", **OLD) as served:
        served.dispatcher.hold_after = 1
        pending = asyncio.create_task(served.client.post("/generate", json={"prompt": "hello", "stream": stream}))
        await asyncio.wait_for(served.dispatcher.held.wait(), 10)
        pending.cancel()
        await asyncio.wait({pending}, timeout=10)

        await asyncio.wait_for(served.dispatcher.closed.wait(), 10)
        assert served.dispatcher.outcomes == ["cancelled"]


async def test_a_stop_string_keeps_the_text_before_it(serve: Any) -> None:
    async with serve("hello world", **OLD) as served:
        served.dispatcher.last_finish = FinishReason.STOP
        answer = await post(served, prompt="a ", stop=[" world"])

        assert answer == {"text": ["a hello"]}
