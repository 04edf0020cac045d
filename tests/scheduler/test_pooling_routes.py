"""POST /pooling and /classify over a dispatcher that answers a prompt with (sum of its ids, number of its ids)."""

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from simulation.prompt import simulated_vector
from tests.scheduler.conftest import Served
from tests.scheduler.test_embeddings import write_architecture
from wire.types import Pooling

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "hello"}]


async def post(served: Served, path: str, **fields: Any) -> Any:
    """Return the body of a successful answer."""
    response = await served.client.post(path, json={"model": served.model} | fields)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture
def classifier(make_model: Any) -> Path:
    """A folder whose architecture has two classes."""
    folder: Path = make_model()
    write_architecture(folder, "Qwen3ForSequenceClassification", id2label={"0": "bad", "1": "good"})
    return folder


@pytest.mark.covers("B.pooling.4")
@pytest.mark.parametrize("fields", [{}, {"task": "embed"}, {"encoding_format": "float", "use_activation": False}])
async def test_pooling_returns_the_vector_of_each_text(serve: Any, fields: dict[str, Any]) -> None:
    async with serve() as served:
        answer = await post(served, "/pooling", input=["hello", "good morning"], **fields)

        ids = [served.ids("hello"), served.ids("good morning")]
        assert (answer["object"], answer["id"][:8], answer["model"]) == ("list", "pooling-", served.model)
        assert answer["data"] == [
            {"object": "pooling", "index": index, "data": list(simulated_vector(one))} for index, one in enumerate(ids)
        ]
        total = sum(map(len, ids))
        assert answer["usage"] == {
            "prompt_tokens": total, "total_tokens": total, "completion_tokens": 0, "prompt_tokens_details": None,
        }  # fmt: skip
        assert served.dispatcher.requests[0].poolings == (Pooling(normalize=fields.get("use_activation")),) * 2


@pytest.mark.parametrize("fields", [{"messages": MESSAGES}, {"input": "hello"}])
async def test_invocations_of_a_classifier_classify(serve: Any, classifier: Path, fields: dict[str, Any]) -> None:
    async with serve(folder=classifier) as served:
        invoked = await post(served, "/invocations", **fields)
        classified = await post(served, "/classify", **fields)

        assert invoked["id"].startswith("classify-")
        assert invoked["data"] == classified["data"]


async def test_invocations_of_a_vectors_model_embed(serve: Any, make_model: Any) -> None:
    folder: Path = make_model()
    write_architecture(folder, "BertModel")
    async with serve(folder=folder) as served:
        answer = await post(served, "/invocations", messages=MESSAGES)

        assert answer["id"].startswith("embd-")
        assert answer["data"] == (await post(served, "/v1/embeddings", messages=MESSAGES))["data"]


@pytest.mark.parametrize(("path", "shape"), [("/v1/embeddings", [2]), ("/pooling", [2])])
async def test_vectors_are_bytes_of_the_requested_dtype(serve: Any, path: str, shape: list[int]) -> None:
    async with serve() as served:
        body = {"model": served.model, "input": [[3, 4], [5]], "embed_dtype": "float16", "endianness": "big"}
        whole = await served.client.post(path, json=body | {"encoding_format": "bytes"})
        alone = await served.client.post(path, json=body | {"encoding_format": "bytes_only"})
        in_base64 = await post(served, path, **body, encoding_format="base64")

        assert whole.headers["content-type"] == alone.headers["content-type"] == "application/octet-stream"
        assert whole.content == alone.content == struct.pack(">4e", 7, 2, 5, 1)
        assert "metadata" not in alone.headers
        metadata = json.loads(whole.headers["metadata"])
        assert set(metadata) == {"id", "created", "model", "data", "usage"}
        fields = {"embed_dtype": "float16", "endianness": "big", "shape": shape}
        assert metadata["data"] == [
            {"index": 0, "start": 0, "end": 4, **fields}, {"index": 1, "start": 4, "end": 8, **fields},
        ]  # fmt: skip
        data = [one["embedding" if path == "/v1/embeddings" else "data"] for one in in_base64["data"]]
        assert b"".join(map(base64.b64decode, data)) == whole.content


async def test_metadata_longer_than_a_header_are_refused(serve: Any) -> None:
    async with serve(max_inputs=1000) as served:
        body = {"model": served.model, "input": [[3]] * 400, "encoding_format": "bytes"}
        refused = await served.client.post("/v1/embeddings", json=body)
        alone = await served.client.post("/v1/embeddings", json=body | {"encoding_format": "bytes_only"})

        assert refused.status_code == 400, refused.text
        assert (
            "a header has at most 32768: request fewer at a time, or bytes_only" in refused.json()["error"]["message"]
        )
        assert len(alone.content) == 400 * 8


async def test_bytes_of_tokens_have_the_shape_of_each_text(serve: Any) -> None:
    async with serve() as served:
        body = {"model": served.model, "input": [[3, 4], [5]], "task": "token_embed", "encoding_format": "bytes"}
        answer = await served.client.post("/pooling", json=body)

        items = json.loads(answer.headers["metadata"])["data"]
        assert [(one["shape"], one["start"], one["end"]) for one in items] == [([2, 1], 0, 8), ([1, 2], 8, 16)]


async def test_values_of_tokens_are_a_list_for_each_token(serve: Any) -> None:
    async with serve() as served:
        answer = await post(served, "/pooling", input=[[3, 4], [5]], task="token_embed", dimensions=2)
        encoded = await post(served, "/pooling", input=[3, 4], task="token_embed", encoding_format="base64")
        chat = await post(served, "/pooling", messages=MESSAGES)

        assert [one["data"] for one in answer["data"]] == [[[7.0], [2.0]], [[5.0, 1.0]]]
        assert struct.unpack("<2f", base64.b64decode(encoded["data"][0]["data"])) == (7.0, 2.0)
        assert served.dispatcher.requests[0].poolings == (Pooling("token_embed", dimensions=2),) * 2
        assert chat["data"][0]["data"] == list(simulated_vector(served.ids("<|im_start|>user\nhello<|im_end|>\n")))


@pytest.mark.covers("B.pooling.5")
async def test_a_classifier_names_the_likeliest_class(serve: Any, classifier: Path) -> None:
    async with serve(folder=classifier) as served:
        answer = await post(served, "/classify", input=["hello", [0]][:1])
        few = await post(served, "/classify", input=[[0]], use_activation=False)
        chat = await post(served, "/classify", messages=MESSAGES)
        pooled = await post(served, "/pooling", input="hello")
        each = await post(served, "/pooling", input="hello", task="token_classify")

        probs = list(simulated_vector(served.ids("hello")))
        assert (answer["object"], answer["id"][:9]) == ("list", "classify-")
        assert answer["data"] == [{"index": 0, "label": "bad", "probs": probs, "num_classes": 2}]
        assert answer["usage"]["prompt_tokens"] == len(served.ids("hello"))
        assert (few["data"][0]["label"], few["data"][0]["probs"]) == ("good", [0.0, 1.0])
        assert len(chat["data"]) == 1
        assert pooled["data"][0]["data"] == probs
        assert len(each["data"][0]["data"]) == len(served.ids("hello"))
        kinds = [request.poolings[0] for request in served.dispatcher.requests]
        classify = Pooling("classify")
        assert kinds == [classify, Pooling("classify", normalize=False), classify, classify, Pooling("token_classify")]


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        ("/pooling", {}, "input", "either input or messages"),
        ("/pooling", {"input": "a", "task": "score"}, "task", "'embed', 'classify', 'token_embed' or 'token_classify'"),
        ("/pooling", {"input": "a", "task": "classify"}, "task", "generates text and supports embed and token_embed"),
        (
            "/pooling",
            {"input": "a", "encoding_format": "int8"},
            "encoding_format",
            "'float', 'base64', 'bytes' or 'bytes_only'",
        ),
        ("/pooling", {"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ("/pooling", {"input": "a", "use_activation": 1}, "use_activation", "valid boolean"),
        ("/pooling", {"input": ["a"] * 9}, "input", "the limit is 8"),
        ("/classify", {"input": "a"}, "model", "needs one that scores pairs of texts or classifies texts"),
    ],
)
async def test_invalid_fields_are_refused_by_name(
    serve: Any, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    async with serve(max_inputs=8) as served:
        error = (await served.client.post(path, json=fields)).json()["error"]

        assert (error["code"], error["param"]) == (400, param)
        assert words in error["message"]
        assert not served.dispatcher.requests


async def test_dimensions_are_for_vectors_alone(serve: Any, classifier: Path) -> None:
    async with serve(folder=classifier) as served:
        error = (await served.client.post("/pooling", json={"input": "a", "dimensions": 2})).json()["error"]
        wrong = (await served.client.post("/classify", json={"input": ""})).json()["error"]

        assert (error["param"], error["message"]) == (
            "dimensions",
            "dimensions are for embed and token_embed, not for classify",
        )
        assert wrong["param"] == "input"
