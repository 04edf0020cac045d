"""POST /v2/embed over a dispatcher that answers a prompt with (sum of its ids, number of its ids)."""

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from simulation.prompt import simulated_vector
from tests.scheduler.conftest import Served
from wire.types import Pooling

pytestmark = pytest.mark.anyio

URL = "/v2/embed"


async def post(served: Served, **fields: Any) -> Any:
    """Return the body of a successful answer."""
    response = await served.client.post(URL, json={"model": served.model} | fields)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.covers("B.pooling.6")
async def test_an_answer_has_coheres_format(serve: Any) -> None:
    async with serve() as served:
        answer = await post(served, texts=["hello", "good morning"], embedding_types=["float", "base64"])

        ids = [served.ids("hello"), served.ids("good morning")]
        floats = [list(simulated_vector(one)) for one in ids]
        assert answer["embeddings"]["float"] == floats
        decoded = [list(struct.unpack("<2f", base64.b64decode(one))) for one in answer["embeddings"]["base64"]]
        assert decoded == floats
        assert (answer["texts"], answer["response_type"]) == (["hello", "good morning"], "embeddings_by_type")
        units = {"input_tokens": sum(map(len, ids)), "image_tokens": 0}
        assert answer["meta"] == {"api_version": {"version": "2"}, "billed_units": units}
        assert served.dispatcher.requests[0].poolings == (Pooling(),) * 2


async def test_inputs_are_their_texts_joined(serve: Any) -> None:
    async with serve() as served:
        content = [{"type": "text", "text": "good "}, {"type": "text", "text": "morning"}]
        answer = await post(served, inputs=[{"content": content}], output_dimension=1)

        assert answer["texts"] is None
        assert list(answer["embeddings"]) == ["float"]
        assert served.dispatcher.requests[0].prompts == (tuple(served.ids("good morning")),)
        assert served.dispatcher.requests[0].poolings == (Pooling(dimensions=1),)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [({}, slice(512)), ({"truncate": "START"}, slice(-512, None)), ({"max_tokens": 3}, slice(3))],
)
async def test_long_texts_are_cut_at_the_requested_end(serve: Any, fields: dict[str, Any], kept: slice) -> None:
    async with serve() as served:
        text = "hello good morning " * 400
        await post(served, texts=[text], **fields)

        assert served.dispatcher.requests[0].prompts == (tuple(served.ids(text)[kept]),)


async def test_bits_are_packed_eight_to_a_number(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vector = (1.0, -1.0, 0.0, -2.0, -0.5, 3.0, 4.0, -4.0, *([-1.0] * 8))
    monkeypatch.setattr("scheduler.vector_run.VectorRun.collect", lambda run, dispatcher: _done([vector]))
    async with serve() as served:
        answer = await post(served, texts=["hello"], embedding_types=["binary", "ubinary"])

        assert answer["embeddings"] == {"binary": [[0b10100110 - 128, -128]], "ubinary": [[0b10100110, 0]]}


async def _done(vectors: list[Any]) -> list[Any]:
    return vectors


async def test_an_input_type_selects_the_models_prefix(serve: Any, make_model: Any) -> None:
    folder: Path = make_model()
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "query: ", "none": 3}}))
    async with serve(folder=folder) as served:
        await post(served, texts=["hello"], input_type="query")
        refused = await served.client.post(URL, json={"texts": ["hello"], "input_type": "none"})

        assert served.dispatcher.requests[0].prompts == (tuple(served.ids("query: hello")),)
        message = refused.json()["error"]["message"]
        assert (refused.status_code, message) == (400, "Unsupported input_type 'none': the model knows query")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "texts", "either texts or inputs"),
        ({"texts": []}, "texts", "none empty"),
        ({"texts": ["a"], "inputs": []}, "texts", "either texts or inputs"),
        ({"inputs": [{"content": [{"type": "image_url", "text": ""}]}]}, "inputs.0.content.0.type", "'text'"),
        ({"images": ["data:"]}, "images", "only text"),
        ({"texts": ["a"], "input_type": "search_query"}, "input_type", "has no instructions for input types"),
        (
            {"texts": ["a"], "embedding_types": ["int8"]},
            "embedding_types.0",
            "'base64', 'binary' or 'ubinary'",
        ),
        (
            {"texts": ["a"], "embedding_types": ["binary"]},
            "embedding_types",
            "multiple of 8 dimensions, but these have 2",
        ),
        ({"texts": ["a " * 600], "truncate": "NONE"}, "texts", "maximum context length is 512 tokens"),
        ({"texts": ["hello good"], "truncate": "NONE", "max_tokens": 1}, "texts", "tokens, but max_tokens is 1"),
        ({"texts": ["a"], "truncate": "MIDDLE"}, "truncate", "'NONE', 'START' or 'END'"),
        ({"texts": ["a"], "output_dimension": 0}, "output_dimension", "greater than or equal to 1"),
    ],
)
async def test_a_bad_body_is_refused_by_the_field(serve: Any, fields: dict[str, Any], param: str, words: str) -> None:
    async with serve() as served:
        response = await served.client.post(URL, json={"model": served.model} | fields)

        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), response.text
        assert words in error["message"]
