"""POST /v2/embed over a dispatcher whose vectors are (sum of the ids, their number)."""

import base64
import struct
from typing import Any

import orjson
import pytest

from scheduler.api.vector_data import encode_types
from tests.scheduler.conftest import Served
from wire.errors import InvalidRequest
from wire.types import Pooling

pytestmark = pytest.mark.anyio


async def post(served: Served, **fields: Any) -> Any:
    """Return the body of a successful answer."""
    response = await served.client.post("/v2/embed", json={"model": served.model} | fields)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.covers("B.pooling.6")
async def test_texts_have_the_vectors_of_v1_embeddings(serve: Any) -> None:
    texts = ["hello", "good morning"]
    async with serve() as served:
        answer = await post(served, texts=texts, input_type="search_document")
        openai = (await served.client.post("/v1/embeddings", json={"input": texts})).json()

        vectors = [one["embedding"] for one in openai["data"]]
        assert answer["embeddings"] == {"float": vectors}
        assert (answer["texts"], answer["response_type"]) == (texts, "embeddings_by_type")
        assert answer["id"].startswith("embd-")
        assert answer["meta"] == {
            "api_version": {"version": "2"},
            "billed_units": {"input_tokens": openai["usage"]["prompt_tokens"]},
        }
        inputs = [{"content": [{"type": "text", "text": text}]} for text in texts]
        assert (await post(served, inputs=inputs, embedding_types=["float"]))["embeddings"] == {"float": vectors}


async def test_dimensions_and_types_are_those_requested(serve: Any) -> None:
    async with serve() as served:
        answer = await post(served, texts=["hello"], embedding_types=["base64", "float", "base64"], output_dimension=2)

        assert list(answer["embeddings"]) == ["base64", "float"]
        (data,), (values,) = answer["embeddings"]["base64"], answer["embeddings"]["float"]
        assert list(struct.unpack("<2f", base64.b64decode(data))) == values
        assert served.dispatcher.requests[0].poolings == (Pooling(dimensions=2),)


async def test_bits_are_the_signs_of_eight_dimensions_a_byte() -> None:
    vectors = [(0.5, -1.0, 0.0, 2.0, -0.1, -0.2, -0.3, 1e-9) * 2, (1.0,) * 16]

    encoded = await encode_types(vectors, ("ubinary", "binary"), max_bytes=100)

    shown = orjson.loads(orjson.dumps(encoded))
    assert shown == {"ubinary": [[145, 145], [255, 255]], "binary": [[17, 17], [127, 127]]}
    with pytest.raises(InvalidRequest, match="a vector of 2 dimensions has no whole bytes"):
        await encode_types([(1.0, 2.0)], ("binary",), max_bytes=100)
    with pytest.raises(InvalidRequest, match=r"2 vectors are more than 20 bytes"):
        await encode_types(vectors, ("ubinary", "binary"), max_bytes=20)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, slice(512)),
        ({"truncate": "END", "max_tokens": 3}, slice(3)),
        ({"truncate": "START", "max_tokens": 3}, slice(-3, None)),
        ({"truncate": "START", "max_tokens": 4000}, slice(-512, None)),
    ],
)
async def test_longer_texts_lose_their_end_or_start(serve: Any, fields: Any, kept: slice) -> None:
    async with serve() as served:
        text = "hello good morning " * 300
        ids = served.ids(text)
        assert len(ids) > 512

        await post(served, texts=[text], **fields)

        assert served.dispatcher.requests[0].prompts == (ids[kept],)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "texts"),
        ({"texts": ["a"], "inputs": [{"content": [{"type": "text", "text": "a"}]}]}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": ["a", ""]}, "texts"),
        ({"texts": ["a"] * 9}, "texts"),
        ({"texts": "a"}, "texts"),
        ({"inputs": [{"content": []}]}, "inputs.0.content"),
        ({"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "inputs.0.content.0"),
        ({"images": ["data:image/png;base64,"]}, "images"),
        ({"texts": ["a"], "input_type": "image"}, "input_type"),
        ({"texts": ["a"], "embedding_types": []}, "embedding_types"),
        ({"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types.0"),
        ({"texts": ["a"], "embedding_types": ["binary"]}, "embedding_types"),
        ({"texts": ["a"], "truncate": "end"}, "truncate"),
        ({"texts": ["a"], "max_tokens": 0}, "max_tokens"),
        ({"texts": ["a"], "output_dimension": 0}, "output_dimension"),
        ({"texts": ["hello " * 600], "truncate": "NONE"}, "texts"),
    ],
)
async def test_invalid_fields_are_refused_with_their_path(serve: Any, fields: Any, param: str) -> None:
    async with serve(max_inputs=8) as served:
        response = await served.client.post("/v2/embed", json={"model": served.model} | fields)

        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
