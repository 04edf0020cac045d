"""POST /inference/v1/generate over a scripted dispatcher: the fields of vLLM 0.33's route."""

import base64
import io
import json
import math
from typing import Any

import numpy as np
import pytest

from testing.scheduler.scripted_dispatcher import Line

pytestmark = pytest.mark.anyio

PATH = "/inference/v1/generate"
CHOICE_NULLS = dict.fromkeys(("routed_experts", "sampling_mask", "weight_versions", "logprobs"))
ANSWER_NULLS = dict.fromkeys((
    "prompt_logprobs", "prompt_token_id_logprobs", "mm_placeholders", "metrics", "kv_transfer_params",
    "ec_transfer_params",
))  # fmt: skip


def body_of(**fields: Any) -> dict[str, Any]:
    """Return a body; sampling parameters are in `fields` with the others."""
    return {"token_ids": [72, 101], "sampling_params": {"max_tokens": 3}} | fields


def chunks_of(text: str) -> list[dict[str, Any]]:
    """Return the chunks of a stream, which ends with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.covers("B.tokens.1")
@pytest.mark.parametrize("mode", ["tokens", "text"])
async def test_an_answer_has_ids_and_in_text_mode_the_text(serve: Any, mode: str) -> None:
    async with serve(lambda *_: Line((75, 76), stop_token_id=77), names=("tiny",)) as served:
        sampling = {"stop_token_ids": [77]}
        body = body_of(output_mode=mode, return_token_ids=True, request_id="mine", sampling_params=sampling)
        answer = (await served.client.post(PATH, json=body)).json()

        text = {"text": served.context.tokens.decode([75, 76])} if mode == "text" else {}
        counts = {"prompt_tokens": 2, "total_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": None}
        stop = {"finish_reason": "stop", "stop_reason": 77}
        assert answer.pop("created") > 0
        assert answer == ANSWER_NULLS | {
            "request_id": "generate-tokens-mine", "model": "tiny", "usage": counts, "prompt_token_ids": [72, 101],
            "output_mode": mode, "choices": [{"index": 0, "token_ids": [75, 76, 77]} | stop | CHOICE_NULLS | text],
        }  # fmt: skip
        (request,) = served.dispatcher.requests
        assert request.params.max_tokens == 510  # the rest of the context, not SamplingParams' 16


@pytest.mark.covers("B.tokens.1")
@pytest.mark.parametrize("mode", ["tokens", "text"])
async def test_a_stream_has_the_ids_of_the_whole_answer(serve: Any, mode: str) -> None:
    async with serve("the quick brown 你好") as served:
        body = body_of(
            sampling_params={"n": 2, "temperature": 1, "max_tokens": 9, "logprobs": 1}, return_token_ids=True,
            output_mode=mode,
        )  # fmt: skip
        whole = (await served.client.post(PATH, json=body)).json()
        usage = {"include_usage": True, "continuous_usage_stats": True}
        response = await served.client.post(PATH, json=body | {"stream": True, "stream_options": usage})

    *chunks, last = chunks_of(response.text)
    assert [("prompt_token_ids" in chunk) for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert chunks[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    for choice in whole["choices"]:
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert [found for one in mine for found in one["token_ids"]] == choice["token_ids"]
        entries = [found for one in mine for found in one["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]
        assert "".join(one.get("text", "") for one in mine) == choice.get("text", "")
        assert [one["finish_reason"] for one in mine][-1] == choice["finish_reason"] == "length"


@pytest.mark.covers("B.tokens.1")
async def test_log_probabilities_have_the_token_itself_first(serve: Any) -> None:
    async with serve(lambda *_: Line((75, 2))) as served:
        sampling = {"max_tokens": 2, "logprobs": 2, "prompt_logprobs": 0}
        answer = (await served.client.post(PATH, json=body_of(sampling_params=sampling))).json()

    def entry(token_id: int, rank: int) -> dict[str, Any]:
        return {"token_id": token_id, "logprob": -token_id / 100, "rank": rank}

    first, second = answer["choices"][0]["logprobs"]["content"]
    assert first == entry(75, 75) | {"top_logprobs": [entry(75, 75), entry(1, 1), entry(2, 2)]}
    assert second == entry(2, 2) | {"top_logprobs": [entry(2, 2), entry(1, 1)]}
    assert [one and list(one) for one in answer["prompt_logprobs"]] == [None, ["101"]]


@pytest.mark.covers("B.tokens.1")
async def test_given_tokens_are_scored_at_positions_of_the_prompt(serve: Any) -> None:
    ids, lists = [72, 101, 30, 40], [[30], [-1, 9, 9]]
    async with serve() as served:
        sampling = {"max_tokens": 1, "prompt_logprob_token_ids": lists, "prompt_logprob_start": 1}
        answers = [
            (await served.client.post(PATH, json=body_of(token_ids=ids, sampling_params=sampling | more))).json()
            for more in ({}, {"prompt_logprobs": 0})
        ]

    for answer in answers:
        scores = np.load(io.BytesIO(base64.b64decode(answer["prompt_token_id_logprobs"])))
        assert scores.dtype == np.float32
        assert scores.tolist() == pytest.approx(np.array([[-0.3, -math.inf, -math.inf], [-math.inf, -0.09, -0.09]]))
    assert answers[0]["prompt_logprobs"] is None
    assert [one and list(one) for one in answers[1]["prompt_logprobs"]] == [None, ["101"], ["30"], ["40"]]


SCORED = "sampling_params.prompt_logprob_token_ids"


def scored(lists: Any, **more: Any) -> dict[str, Any]:
    """Return the sampling parameters of a body that scores these tokens."""
    return {"sampling_params": {"max_tokens": 1, "prompt_logprob_token_ids": lists} | more}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": []}, "token_ids"), ({"token_ids": [-1]}, "token_ids"), ({"token_ids": [384]}, "token_ids"),
    ({"token_ids": "hi"}, "token_ids"), ({"token_ids": [1] * 513}, "token_ids"),
    ({"token_ids": [1] * 512}, "token_ids"),
    ({"sampling_params": None}, "sampling_params"), ({"output_mode": "derender"}, "output_mode"),
    ({"output_mode": "text", "sampling_params": {"detokenize": False}}, "output_mode"),
    ({"sampling_params": {"detokenize": False, "stop": "a"}}, "sampling_params.stop"),
    ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
    ({"sampling_params": {"n": 2, "temperature": 0}}, "sampling_params.n"),
    ({"sampling_params": {"stop": [""]}}, "sampling_params.stop"),
    ({"sampling_params": {"watermarking": True}}, "sampling_params.watermarking"),
    ({"sampling_params": {"extra_args": {"a": 1}}}, "sampling_params.extra_args"),
    ({"sampling_params": {"kv_transfer_params": {}}}, "sampling_params.kv_transfer_params"),
    ({"kv_transfer_params": {}}, "kv_transfer_params"), ({"features": {}}, "features"),
    ({"content_parts": [{"type": "image_url"}]}, "content_parts"), ({"stream_options": {}}, "stream_options"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"stream": True, "sampling_params": {"prompt_logprobs": 1}}, "sampling_params"),
    (scored([]), SCORED), (scored([[]]), SCORED), (scored([[3], [3]]), SCORED), (scored([[384]]), SCORED),
    (scored([[-2]]), SCORED), (scored([[True]]), SCORED), (scored([[1] * 21]), SCORED), (scored([3]), SCORED),
    (scored([[3]]) | {"stream": True}, SCORED), (scored([[3]], prompt_logprob_start=1), SCORED),
    (scored([[3]], prompt_logprobs=1), "sampling_params.prompt_logprobs"),
    (scored([[3]], prompt_logprob_start=-1), "sampling_params.prompt_logprob_start"),
    (scored(None, prompt_logprob_start=1), "sampling_params.prompt_logprob_start"),
]  # fmt: skip


@pytest.mark.covers("B.tokens.2")
@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[f"{at} {param}" for at, (_, param) in enumerate(REFUSED)])
async def test_a_wrong_field_is_400_with_its_path(serve: Any, fields: dict[str, Any], param: str) -> None:
    async with serve() as served:
        response = await served.client.post(PATH, json=body_of(**fields))

        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"].startswith(param)
        assert served.dispatcher.requests == []


async def test_fields_of_the_render_route_have_no_effect(serve: Any) -> None:
    rendered = {"token_offsets": [[0, 1]], "parse_context": {}, "reasoning_ended": True, "content_parts": []}
    async with serve() as served:
        response = await served.client.post(PATH, json=body_of(**rendered, reasoning_parser_kwargs={}))

        assert (response.status_code, "warning" in response.headers) == (200, False)
