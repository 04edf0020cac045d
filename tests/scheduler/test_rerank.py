"""POST /rerank in the forms of Jina and Cohere, over a dispatcher whose vectors are (sum of the ids, their number)."""

from typing import Any

import pytest

from tests.scheduler.conftest import Served
from tests.scheduler.test_embeddings import write_architecture

pytestmark = pytest.mark.anyio

PATHS = ["/rerank", "/v1/rerank", "/v2/rerank"]
DOCUMENTS = ["good morning", "hello", "the quick brown fox"]


async def post(served: Served, path: str = "/rerank", **fields: Any) -> Any:
    """Return the body of a successful answer."""
    response = await served.client.post(path, json={"model": served.model} | fields)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.covers("B.pooling.3")
@pytest.mark.parametrize("path", PATHS)
async def test_documents_are_sorted_by_the_score_of_their_pair(serve: Any, path: str) -> None:
    async with serve() as served:
        answer = await post(served, path, query="hello", documents=DOCUMENTS)
        scored = await post(served, "/score", text_1="hello", text_2=DOCUMENTS)

        scores = [one["score"] for one in scored["data"]]
        order = sorted(range(3), key=lambda index: -scores[index])
        assert order[0] == 1
        assert answer["id"].startswith("rerank-")
        assert answer["model"] == served.model
        assert answer["results"] == [
            {"index": index, "relevance_score": scores[index], "document": {"text": DOCUMENTS[index]}}
            for index in order
        ]
        total = scored["usage"]["prompt_tokens"]
        assert answer["usage"] == {"prompt_tokens": total, "total_tokens": total}


async def test_fields_of_jina_and_cohere_are_followed(serve: Any) -> None:
    async with serve() as served:
        whole = (await post(served, query="hello", documents=DOCUMENTS))["results"]
        objects: list[Any] = [{"text": DOCUMENTS[0], "title": "a"}, *DOCUMENTS[1:]]

        for count in (1, 2):
            assert (await post(served, query="hello", documents=objects, top_n=count))["results"] == whole[:count]
        for count in (0, 3, 1000):
            assert (await post(served, query="hello", documents=objects, top_n=count))["results"] == whole
        bare = await post(served, query="hello", documents=DOCUMENTS, return_documents=False)
        assert bare["results"] == [{key: one[key] for key in ("index", "relevance_score")} for one in whole]
        alone = await post(served, query="hello", documents="hello", rank_fields=["text"], max_chunks_per_doc=1)
        assert [one["index"] for one in alone["results"]] == [0]
        equal = await post(served, query="hello", documents=["hello"] * 4, max_tokens_per_doc=9)
        assert [one["index"] for one in equal["results"]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": ["a"], "documents": ["a"]}, "query"),
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "a"}, "documents"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": ["b", ""]}, "documents"),
        ({"query": "a", "documents": ["b"] * 9}, "documents"),
        ({"query": "a", "documents": ["b", 3]}, "documents.1"),
        ({"query": "a", "documents": ["b", ["c"]]}, "documents.1"),
        ({"query": "a", "documents": ["b", {"title": "c"}]}, "documents.1.text"),
        ({"query": "a", "documents": [{"text": None}]}, "documents.0.text"),
        ({"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ({"query": "a", "documents": ["b"], "top_n": 1.5}, "top_n"),
        ({"query": "a", "documents": ["b"], "top_n": 2**31}, "top_n"),
        ({"query": "a", "documents": ["b"], "return_documents": "yes"}, "return_documents"),
        ({"query": "a", "documents": ["b"], "rank_fields": ["title"]}, "rank_fields"),
        ({"query": "a", "documents": ["b"], "max_tokens_per_doc": 512}, "max_tokens_per_doc"),
        ({"query": "hello " * 600, "documents": ["b"]}, "query"),
        ({"query": "a", "documents": ["hello " * 600]}, "documents"),
    ],
)
async def test_invalid_fields_are_refused_with_their_path(serve: Any, fields: Any, param: str) -> None:
    async with serve(max_inputs=8) as served:
        response = await served.client.post("/v2/rerank", json={"model": served.model} | fields)

        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
        assert not served.dispatcher.requests


async def test_a_classifier_of_several_labels_ranks_nothing(serve: Any, make_model: Any) -> None:
    folder = make_model()
    write_architecture(folder, "LlamaForSequenceClassification", num_labels=3)
    async with serve(folder=folder) as served:
        for path, body in (("/rerank", {"query": "a", "documents": ["b"]}), ("/score", {"text_1": "a", "text_2": "b"})):
            error = (await served.client.post(path, json=body)).json()["error"]

            assert (error["code"], error["param"]) == (400, "model")
            assert error["message"].startswith(f"the model classifies texts; {path} needs one that generates text or")
