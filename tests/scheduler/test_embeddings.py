"""POST /v1/embeddings over a scripted dispatcher that answers a prompt with (sum of its ids, number of its ids)."""

import asyncio
import base64
import json
import struct
from pathlib import Path
from typing import Any

import openai
import pytest

from simulation.prompt import simulated_vector
from tests.scheduler.conftest import Served
from wire.errors import InvalidRequest, Overloaded
from wire.types import Pooling

pytestmark = pytest.mark.anyio

URL = "/v1/embeddings"


async def post(served: Served, **fields: Any) -> Any:
    """Return the body of a successful answer."""
    response = await served.client.post(URL, json={"model": served.model} | fields)
    assert response.status_code == 200, response.text
    return response.json()


async def refusal(served: Served, **fields: Any) -> Any:
    """Return the error of a 400."""
    response = await served.client.post(URL, json={"model": served.model} | fields)
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.covers("A1.9")
async def test_a_text_is_answered_in_openais_format(serve: Any) -> None:
    async with serve() as served:
        answer = await post(served, input="hello world")

        ids = served.ids("hello world")
        assert answer["object"] == "list"
        assert answer["id"].startswith("embd-")
        assert answer["model"] == served.model
        assert isinstance(answer["created"], int)
        assert answer["data"] == [{"object": "embedding", "index": 0, "embedding": list(simulated_vector(ids))}]
        assert answer["usage"] == {"prompt_tokens": len(ids), "total_tokens": len(ids), "completion_tokens": 0}
        assert served.dispatcher.requests[0].poolings == (Pooling(),)


async def test_the_clients_id_is_in_the_answers(serve: Any) -> None:
    async with serve() as served:
        headers, body = {"x-request-id": "my-7"}, {"model": served.model, "input": "a"}

        response = await served.client.post(URL, json=body, headers=headers)

        assert response.json()["id"] == "embd-my-7"
        assert served.dispatcher.requests[0].request_id != "embd-my-7"


@pytest.mark.parametrize("form", ["texts", "ids", "lists of ids"])
async def test_every_form_of_input_is_answered_in_order(serve: Any, form: str) -> None:
    async with serve() as served:
        ids = [served.ids("hello"), served.ids("good morning")]
        forms = {"texts": ["hello", "good morning"], "ids": list(ids[0]), "lists of ids": [list(one) for one in ids]}

        answer = await post(served, input=forms[form])

        expected = ids[:1] if form == "ids" else ids
        assert [one["embedding"] for one in answer["data"]] == [list(simulated_vector(one)) for one in expected]
        assert [one["index"] for one in answer["data"]] == list(range(len(expected)))


async def test_base64_is_little_endian_float32(serve: Any) -> None:
    async with serve() as served:
        answer = await post(served, input=[3, 4, 5], encoding_format="base64")

        data = base64.b64decode(answer["data"][0]["embedding"])
        assert struct.unpack("<2f", data) == (12.0, 3.0)


async def test_messages_are_rendered_by_the_models_template(serve: Any) -> None:
    async with serve() as served:
        answer = await post(served, messages=[{"role": "user", "content": "hello"}])

        ids = served.ids("<|im_start|>user\nhello<|im_end|>\n")
        assert answer["data"][0]["embedding"] == list(simulated_vector(ids))


async def test_truncation_keeps_the_last_tokens(serve: Any) -> None:
    async with serve() as served:
        for keep, expected in ((2, (6, 7)), (-1, (4, 5, 6, 7))):
            await post(served, input=[4, 5, 6, 7], truncate_prompt_tokens=keep)

            assert served.dispatcher.requests[-1].prompts == (expected,)

        await post(served, input=[4, 5, 6, 7], truncate_prompt_tokens=1, truncation_side="right")
        assert served.dispatcher.requests[-1].prompts == ((4,),)

        long = [5] * 600
        assert (await refusal(served, input=long))["param"] == "input"
        await post(served, input=long, truncate_prompt_tokens=-1)
        assert len(served.dispatcher.requests[-1].prompts[0]) == 512


@pytest.mark.parametrize(
    ("path", "field"), [(URL, "dimensions"), ("/pooling", "dimensions"), ("/v2/embed", "output_dimension")]
)
@pytest.mark.parametrize(
    ("settings", "refused", "words"),
    [
        ({"matryoshka_dimensions": [2, 4]}, 3, "must be one that the model was trained for: 2, 4"),
        ({"is_matryoshka": False}, 2, "the model was not trained for truncated vectors: leave it out"),
    ],
    ids=["named", "none"],
)
async def test_vectors_are_cut_to_the_dimensions_of_the_config(
    serve: Any, make_model: Any, path: str, field: str, settings: Any, refused: int, words: str
) -> None:
    config = (folder := make_model()) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    body = {"texts": ["hi"]} if path == "/v2/embed" else {"input": "hi"}
    allowed = (*settings.get("matryoshka_dimensions", ()), None)
    async with serve(folder=folder) as served:
        answers = [await served.client.post(path, json=body | {field: given}) for given in (*allowed, refused)]

    assert [answer.status_code for answer in answers] == [*(200 for _ in allowed), 400]
    error = answers[-1].json()["error"]
    assert error["param"] == field
    assert error["message"].startswith(f"{field} is {refused}, ")
    assert words in error["message"]


async def test_a_text_of_exactly_the_models_length_is_accepted(serve: Any) -> None:
    async with serve() as served:
        await post(served, input=[5] * 512)

        message = (await refusal(served, input=[5] * 513))["message"]
        assert "maximum context length is 512 tokens; a text has 513" in message


async def test_the_tokenizers_special_tokens_are_added_at_both_ends(serve: Any, make_model: Any) -> None:
    folder = make_model(add_bos_token=True, add_eos_token=True)
    async with serve(folder=folder) as served:
        bos, eos = served.ids("<|endoftext|>"), served.ids("<|im_end|>")

        await post(served, input="hello")
        await post(served, input="hello", add_special_tokens=False)

        read = [request.prompts[0] for request in served.dispatcher.requests]
        assert read == [(*bos, *served.ids("hello"), *eos), served.ids("hello")]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "input", "specify either input or messages"),
        ({"input": "a", "messages": []}, "input", "specify either input or messages"),
        ({"input": ""}, "input", "text 0 is empty"),
        ({"input": []}, "input", "none empty"),
        ({"input": [[]]}, "input", "none empty"),
        ({"input": ["a", 3]}, "input", "a list of such lists"),
        ({"input": [True]}, "input", "a list of such lists"),
        ({"input": {"text": "a"}}, "input", "input must be a string"),
        ({"input": [400]}, "input", "token id 400 is out of vocabulary"),
        ({"input": [2**70]}, "input", "a list of such lists"),
        ({"input": ["a"] * 5}, "input", "input has 5 texts, but the limit is 4 (--max-inputs)"),
        ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float', 'base64', 'bytes' or 'bytes_only'"),
        ({"input": "a", "embed_dtype": "int8"}, "embed_dtype", "'fp8_e4m3' or 'fp8_e5m2'"),
        ({"input": "a", "endianness": "up"}, "endianness", "'native', 'little' or 'big'"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be from 1 to 512"),
        ({"input": "a", "truncate_prompt_tokens": 513}, "truncate_prompt_tokens", "must be from 1 to 512"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "must follow an assistant"),
        ({"input": "a", "kv_transfer_params": None}, "kv_transfer_params", "belongs to the cluster"),
    ],
)
async def test_invalid_fields_are_refused_by_name(serve: Any, fields: Any, param: str, words: str) -> None:
    async with serve(max_inputs=4) as served:
        error = await refusal(served, **fields)

        assert error["param"] == param
        assert words in error["message"]
        assert not served.dispatcher.requests


async def test_an_unknown_model_is_404(serve: Any) -> None:
    async with serve() as served:
        response = await served.client.post(URL, json={"model": "other", "input": "a"})

        assert (response.status_code, response.json()["error"]["param"]) == (404, "model")


async def test_an_instances_refusal_is_400_with_the_field(serve: Any) -> None:
    async with serve() as served:
        words = "dimensions is 65, but the model's vectors have 64"
        served.dispatcher.refuse_with = InvalidRequest(words)

        error = await refusal(served, input="a", dimensions=65)

        assert (error["message"], error["param"]) == (words, "dimensions")


async def test_the_priority_is_the_bodys_or_else_the_headers(serve: Any) -> None:
    async with serve() as served:
        body, header = {"model": served.model, "input": "a"}, {"x-vllm-priority": "7"}

        for fields, headers in (({}, {}), ({}, header), ({"priority": -3}, header)):
            await served.client.post(URL, json=body | fields, headers=headers)

        assert [request.priority for request in served.dispatcher.requests] == [0, 7, -3]
        assert (await refusal(served, input="a", priority=2**31))["param"] == "priority"


async def test_a_full_queue_is_429(serve: Any) -> None:
    async with serve() as served:
        served.dispatcher.refuse_with = Overloaded("the queue is full")

        response = await served.client.post(URL, json={"model": served.model, "input": "a"})

        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"


async def test_many_texts_take_turns_in_the_queue(serve: Any) -> None:
    async with serve(max_prompts=3) as served:
        answer = await post(served, input=[[i + 1] for i in range(8)])

        assert [one["embedding"] for one in answer["data"]] == [[i + 1.0, 1.0] for i in range(8)]
        assert [len(request.prompts) for request in served.dispatcher.requests] == [3, 3, 2]
        assert {len(request.poolings) for request in served.dispatcher.requests} == {3, 2}


async def test_the_metrics_count_the_request_but_no_generated_tokens(serve: Any) -> None:
    async with serve(max_prompts=2) as served:
        response = await served.client.post(URL, json={"model": served.model, "input": [[1, 2], [3], [4, 5, 6]]})
        text = (await served.client.get("/metrics")).text

        assert "prefill;dur=100" in response.headers["server-timing"]
        assert 'pdserve_request_endings_total{ending="finished"} 1.0' in text
        assert "pdserve_request_prompt_tokens_sum 6.0" in text
        assert "pdserve_prompt_tokens_total 6.0" in text
        assert "pdserve_request_generation_tokens_count 0.0" in text
        assert 'pdserve_stage_seconds_count{stage="prefill"} 3.0' in text


async def test_a_client_that_disconnects_cancels_its_request(serve: Any) -> None:
    async with serve() as served:
        served.dispatcher.hold_after = 1
        body = {"model": served.model, "input": [[1], [2], [3]]}
        pending = asyncio.create_task(served.client.post(URL, json=body))
        await asyncio.wait_for(served.dispatcher.held.wait(), 10)
        pending.cancel()
        await asyncio.wait({pending}, timeout=10)

        await asyncio.wait_for(served.dispatcher.closed.wait(), 10)
        assert served.dispatcher.outcomes == ["cancelled"]
        assert served.context.drain.active == 0


async def test_a_cross_encoder_refuses_with_a_reason(serve: Any, make_model: Any) -> None:
    folder = make_model()
    write_architecture(folder, "BertForSequenceClassification", num_labels=1)
    async with serve(folder=folder) as served:
        error = await refusal(served, input="a")

        assert error["param"] == "model"
        assert (
            "scores pairs of texts; /v1/embeddings needs one that generates text or makes vectors" in error["message"]
        )


async def test_the_official_client_reads_the_vectors(serve: Any) -> None:
    async with serve() as served:
        client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=served.client, max_retries=0)

        answer = await client.embeddings.create(model=served.model, input=["hello", "good morning"])
        floats = await client.embeddings.create(model=served.model, input="hello", encoding_format="float")
        model = await client.models.retrieve(served.model)

        expected = [list(simulated_vector(served.ids(text))) for text in ("hello", "good morning")]
        assert [one.embedding for one in answer.data] == expected
        assert floats.data[0].embedding == expected[0]
        assert model.id == served.model


def write_architecture(folder: Path, name: str, **keys: Any) -> None:
    """Write the architecture, and other keys, into the folder's config.json."""
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": [name]} | keys))
