"""POST /v1/completions over a scripted dispatcher."""

import json
from typing import Any

import httpx
import pytest

from testing.scheduler.scripted_dispatcher import Line
from wire.errors import HandoffFailed, InternalError, InvalidGrammar, Overloaded, PdserveError, Unavailable
from wire.types import FinishReason

pytestmark = pytest.mark.anyio


def events(response: httpx.Response) -> list[Any]:
    """Return the events of a stream, [DONE] as text."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def streamed_text(chunks: list[Any], index: int = 0) -> str:
    """Return the joined text of one choice."""
    return "".join(
        choice["text"]
        for chunk in chunks
        if chunk != "[DONE]"
        for choice in chunk.get("choices", ())
        if choice["index"] == index
    )


@pytest.mark.covers("B.text.1")
async def test_a_completion_has_every_field_and_true_counts(serve: Any) -> None:
    async with serve("hello world", names=("tiny",)) as served:
        response = await served.client.post("/v1/completions", json={"model": "tiny", "prompt": "San Francisco is a"})

        body = response.json()
        assert response.status_code == 200
        assert body["object"] == "text_completion"
        assert body["id"].startswith("cmpl-")
        choice = {key: value for key, value in body["choices"][0].items() if value is not None}
        assert choice == {"index": 0, "text": "hello world", "finish_reason": "length"}
        assert body["choices"][0]["stop_reason"] is None
        prompt, output = len(served.ids("San Francisco is a")), len(served.ids("hello world"))
        assert body["usage"] == {
            "prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output,
            "prompt_tokens_details": None,
        }  # fmt: skip
        assert 'send;dur=10.000;desc="bytes=4096 transport=shm"' in response.headers["server-timing"]


async def test_max_tokens_defaults_to_16(serve: Any) -> None:
    async with serve() as served:
        await served.client.post("/v1/completions", json={"model": served.model, "prompt": "hi", "max_tokens": None})

        assert served.dispatcher.requests[0].params.max_tokens == 16


@pytest.mark.parametrize("prompt", ["hi", ["hi", "good"], [1, 2, 3], [[1, 2], [3]]])
async def test_all_four_prompt_forms_are_served_prompt_major(serve: Any, prompt: Any) -> None:
    def script(request: Any, prompt: int, sequence: int) -> Line:
        return Line((ord("a") - 97 + prompt * 2 + sequence + 64,))

    async with serve(script) as served:
        response = await served.client.post("/v1/completions", json={"model": served.model, "prompt": prompt, "n": 2})

        num_prompts = len(served.dispatcher.requests[0].prompts)
        choices = response.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(2 * num_prompts))
        assert [choice["text"] for choice in choices] == [
            served.context.tokens.decode([64 + index]) for index in range(2 * num_prompts)
        ]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_before_every_choice(serve: Any, stream: bool) -> None:
    body = {"prompt": "say: ", "echo": True, "n": 2, "stream": stream}
    async with serve("hello") as served:
        response = await served.client.post("/v1/completions", json=body | {"model": served.model})

        texts = (
            [streamed_text(events(response), index) for index in (0, 1)]
            if stream
            else [choice["text"] for choice in response.json()["choices"]]
        )
        assert texts == ["say: hello", "say: hello"]


async def test_a_stop_token_ends_the_text_and_is_the_stop_reason(serve: Any, model_folder: Any) -> None:
    ids = {"stop": 5}

    def script(request: Any, prompt: int, sequence: int) -> Line:
        return Line((70, 71), stop_token_id=ids["stop"])

    async with serve(script) as served:
        body = {"model": served.model, "prompt": "hi", "stop_token_ids": [5], "skip_special_tokens": False}
        reported = (await served.client.post("/v1/completions", json=body)).json()
        ids["stop"] = served.context.tokens.eos_token_ids[0]
        silent = (await served.client.post("/v1/completions", json=body)).json()
        shown = (await served.client.post("/v1/completions", json=body | {"include_stop_str_in_output": True})).json()

        text = served.context.tokens.decode((70, 71))
        assert {key: value for key, value in reported["choices"][0].items() if value is not None} == {
            "index": 0, "text": text, "finish_reason": "stop", "stop_reason": 5,
        }  # fmt: skip
        assert (silent["choices"][0]["text"], silent["choices"][0]["stop_reason"]) == (text, None)
        assert silent["usage"]["completion_tokens"] == 3
        assert shown["choices"][0]["text"] == text + "<|im_end|>"


async def test_ignore_eos_drops_the_models_eos_ids_from_the_stop_ids(serve: Any) -> None:
    async with serve() as served:
        body = {"model": served.model, "prompt": "hi", "stop_token_ids": [5]}
        await served.client.post("/v1/completions", json=body)
        await served.client.post("/v1/completions", json=body | {"ignore_eos": True})

        with_eos, without = (request.params.stop_token_ids for request in served.dispatcher.requests)
        assert with_eos == (*served.context.tokens.eos_token_ids, 5)
        assert without == (5,)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["o w", "world", "你好", ["zzz", "好"], "!"])
async def test_text_ends_before_the_stop_string_without_any_part_of_it(serve: Any, stream: bool, stop: Any) -> None:
    answer = "hello world 你好 good morning"
    async with serve(answer) as served:
        body = {"model": served.model, "prompt": "hi", "stop": stop, "stream": stream, "max_tokens": 100}
        response = await served.client.post("/v1/completions", json=body)

        found = [text for text in ([stop] if isinstance(stop, str) else stop) if text in answer]
        text = streamed_text(events(response)) if stream else response.json()["choices"][0]["text"]
        assert text == (answer[: answer.index(found[0])] if found else answer)
        assert served.dispatcher.stopped == ([(0, 0)] if found else [])
        assert served.dispatcher.outcomes == ["finished"]


async def test_a_stop_string_can_be_kept_in_the_output(serve: Any) -> None:
    async with serve("hello world") as served:
        body = {"model": served.model, "prompt": "hi", "stop": "wor", "include_stop_str_in_output": True}
        choice = (await served.client.post("/v1/completions", json=body)).json()["choices"][0]

        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hello wor", "stop", "wor")


async def test_stop_strings_count_only_after_min_tokens(serve: Any) -> None:
    async with serve("hello hello") as served:
        first = len(served.ids("hello"))
        body = {"model": served.model, "prompt": "hi", "stop": "hello", "min_tokens": first}
        choice = (await served.client.post("/v1/completions", json=body)).json()["choices"][0]

        assert choice["text"] == "hello "


async def test_a_stream_interleaves_choices_and_finishes_each_once(serve: Any) -> None:
    async with serve("hello world") as served:
        body = {
            "model": served.model, "prompt": ["a", "b"], "n": 2, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        response = await served.client.post("/v1/completions", json=body)

        *chunks, usage, done = events(response)
        finished = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
        assert response.headers["content-type"].startswith("text/event-stream")
        assert done == "[DONE]"
        assert sorted(finished) == [0, 1, 2, 3]
        assert [streamed_text(chunks, index) for index in range(4)] == ["hello world"] * 4
        assert {chunk["id"] for chunk in [*chunks, usage]} == {usage["id"]}
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 4 * len(served.ids("hello world"))
        assert [one["transport"] for one in usage["pdserve"]] == ["shm", "shm"]
        assert not any("usage" in chunk for chunk in chunks)


async def test_a_failure_before_the_first_token_is_an_http_status(serve: Any) -> None:
    async with serve() as served:
        served.dispatcher.fail_after, served.dispatcher.error = 0, Unavailable("no decode instance lives")
        response = await served.client.post(
            "/v1/completions", json={"model": served.model, "prompt": "hi", "stream": True}
        )

        assert response.status_code == 503
        assert response.json()["error"]["message"] == "no decode instance lives"


@pytest.mark.covers("B.stream.6")
@pytest.mark.parametrize(
    ("error", "fields", "reported"),
    [
        (HandoffFailed("the KV did not arrive whole"), {}, (500, None, "the KV did not arrive whole")),
        (
            InvalidGrammar("the grammar cannot continue"),
            {"guided_grammar": "start: /a/"},
            (400, "guided_grammar", "the grammar cannot continue"),
        ),
    ],
    ids=["hand-off", "grammar"],
)
async def test_a_failure_in_mid_stream_is_an_error_event_and_ends_it(
    serve: Any, error: PdserveError, fields: dict[str, Any], reported: tuple[int, str | None, str]
) -> None:
    async with serve() as served:
        served.dispatcher.fail_after, served.dispatcher.error = 1, error
        response = await served.client.post(
            "/v1/completions", json={"model": served.model, "prompt": "hi", "stream": True} | fields
        )

        *chunks, last = events(response)
        assert tuple(last["error"][name] for name in ("code", "param", "message")) == reported
        assert not any(chunk["choices"][0]["finish_reason"] for chunk in chunks)


@pytest.mark.covers("B.errors.10")
@pytest.mark.parametrize(("is_final", "should_retry"), [(False, None), (True, "false")])
async def test_a_full_queue_is_429_with_retry_after(serve: Any, is_final: bool, should_retry: str | None) -> None:
    async with serve() as served:
        served.dispatcher.refuse_with = Overloaded("1000 requests are waiting", 7, is_final=is_final)
        response = await served.client.post("/v1/completions", json={"model": served.model, "prompt": "hi"})

        assert (response.status_code, response.headers["retry-after"]) == (429, "7")
        assert response.headers.get("x-should-retry") == should_retry
        assert response.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.covers("B.errors.9")
@pytest.mark.parametrize("error", [InternalError("0x7f at /home/secret"), ZeroDivisionError("/home/secret")])
async def test_an_internal_error_is_500_with_the_request_id_and_no_details(serve: Any, error: Any) -> None:
    async with serve() as served:
        served.dispatcher.refuse_with = error
        response = await served.client.post("/v1/completions", json={"model": served.model, "prompt": "hi"})

        assert response.status_code == 500
        assert response.headers["x-request-id"] in response.json()["error"]["message"]
        assert "secret" not in response.text


async def test_a_sequence_that_ends_without_a_result_fails_the_request(serve: Any) -> None:
    async with serve() as served:
        served.dispatcher.last_finish = FinishReason.FAILED
        response = await served.client.post("/v1/completions", json={"model": served.model, "prompt": "hi"})

        assert response.status_code == 500
        assert served.dispatcher.outcomes == ["failed"]


async def test_while_draining_new_requests_are_refused(serve: Any) -> None:
    async with serve() as served:
        served.context.drain.begin()
        response = await served.client.post("/v1/completions", json={"model": served.model, "prompt": "hi"})

        assert response.status_code == 503
        assert "shutting down" in response.json()["error"]["message"]
        assert served.context.drain.active == 0


async def test_without_a_seed_every_prompt_gets_its_own(serve: Any) -> None:
    async with serve() as served:
        body = {"model": served.model, "prompt": ["same", "same"]}
        await served.client.post("/v1/completions", json=body)
        await served.client.post("/v1/completions", json=body | {"seed": 7})

    drawn, given = served.dispatcher.requests
    assert drawn.params_of(0).seed != drawn.params_of(1).seed
    assert [given.params_of(prompt).seed for prompt in (0, 1)] == [7, 7]
