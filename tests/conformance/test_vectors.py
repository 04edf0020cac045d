"""A1 (bodies of 9 and 10), A2 and section B's Pooling, Tokenizer, Ops: one causal model, combined and over P/D."""

import importlib.util
import math
from typing import Any

import openai
import pytest
import torch

from tests.conformance.served import CHAT, PROMPT, Oracle, Served

pytestmark = pytest.mark.cluster

TEXTS = ["hello", PROMPT, "what is the capital of France?"]


def vector(oracle: Oracle, ids: list[int]) -> list[float]:
    """Return the last token's hidden state at length 1, as transformers has it."""
    with torch.no_grad():
        hidden = oracle.network.model(torch.tensor([ids])).last_hidden_state[0, -1].double()
    values: list[float] = (hidden / hidden.norm()).tolist()
    return values


def posted(served: Served, path: str, **body: Any) -> dict[str, Any]:
    """Return the body of a successful answer."""
    response = served.post(path, **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.covers("B.pooling.1", "A1.9")
def test_embeddings_are_the_hidden_states_of_transformers(served: Served, oracle: Oracle) -> None:
    answer = posted(served, "/v1/embeddings", input=TEXTS)

    ids = [oracle.tokenizer.encode(text) for text in TEXTS]
    assert (answer["object"], answer["id"][:5], answer["model"]) == ("list", "embd-", "tiny")
    for index, one in enumerate(answer["data"]):
        assert (one["object"], one["index"], len(one["embedding"])) == ("embedding", index, 64)
        assert one["embedding"] == pytest.approx(vector(oracle, ids[index]), abs=1e-5)
    total = sum(map(len, ids))
    assert answer["usage"] == {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0}
    again = posted(served, "/v1/embeddings", input=TEXTS)["data"]
    assert [one["embedding"] for one in again] == [pytest.approx(one["embedding"], abs=1e-6) for one in answer["data"]]


@pytest.mark.covers("A1.9")
def test_every_form_of_input_gives_the_same_vector(served: Served, oracle: Oracle) -> None:
    ids = oracle.tokenizer.encode(PROMPT)
    forms: list[Any] = [PROMPT, [PROMPT], ids, [ids]]

    found = [posted(served, "/v1/embeddings", input=form)["data"] for form in forms]

    expected = pytest.approx(vector(oracle, ids), abs=1e-5)
    assert [[one["embedding"] for one in data] for data in found] == [[expected]] * 4


@pytest.mark.covers("B.pooling.1")
def test_a_conversation_has_a_vector(served: Served, oracle: Oracle) -> None:
    answer = posted(served, "/v1/embeddings", messages=CHAT)

    ids = oracle.tokenizer.apply_chat_template(CHAT, return_dict=False)
    assert answer["data"][0]["embedding"] == pytest.approx(vector(oracle, ids), abs=1e-5)


@pytest.mark.covers("B.pooling.1")
def test_dimensions_are_the_first_ones_at_length_1(served: Served, oracle: Oracle) -> None:
    cut = posted(served, "/v1/embeddings", input=PROMPT, dimensions=8)["data"][0]["embedding"]

    first = vector(oracle, oracle.tokenizer.encode(PROMPT))[:8]
    assert cut == pytest.approx([value / math.hypot(*first) for value in first], abs=1e-5)
    refused = served.post("/v1/embeddings", input=PROMPT, dimensions=65)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "dimensions"
    assert "dimensions is 65, but the model's vectors have 64" in refused.json()["error"]["message"]


@pytest.mark.covers("B.pooling.2", "A1.10")
@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_scores_are_the_cosines_of_the_vectors(served: Served, oracle: Oracle, path: str) -> None:
    answer = posted(served, path, text_1=PROMPT, text_2=TEXTS)

    first, *others = (torch.tensor(vector(oracle, oracle.tokenizer.encode(text))) for text in (PROMPT, *TEXTS))
    expected = [float(first @ other) for other in others]
    assert (answer["object"], answer["id"][:6]) == ("list", "score-")
    assert [(one["index"], one["object"]) for one in answer["data"]] == [(i, "score") for i in range(3)]
    assert [one["score"] for one in answer["data"]] == pytest.approx(expected, abs=1e-5)
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens_details"] is None


@pytest.mark.covers("B.pooling.3")
@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_reranked_documents_have_the_cosines_of_the_vectors(served: Served, oracle: Oracle, path: str) -> None:
    answer = posted(served, path, query=PROMPT, documents=TEXTS, top_n=2)

    first, *others = (torch.tensor(vector(oracle, oracle.tokenizer.encode(text))) for text in (PROMPT, *TEXTS))
    expected = sorted(((float(first @ other), index) for index, other in enumerate(others)), reverse=True)[:2]
    assert [one["index"] for one in answer["results"]] == [index for _, index in expected]
    assert [one["relevance_score"] for one in answer["results"]] == pytest.approx(
        [one for one, _ in expected], abs=1e-5
    )
    assert answer["results"][0]["document"] == {"text": PROMPT}


@pytest.mark.covers("B.pooling.4")
def test_pooling_has_the_vector_of_each_token(served: Served, oracle: Oracle) -> None:
    each = posted(served, "/pooling", input=PROMPT, task="token_embed", dimensions=8)["data"][0]["data"]
    whole = posted(served, "/pooling", input=PROMPT)["data"][0]["data"]

    ids = oracle.tokenizer.encode(PROMPT)
    assert whole == pytest.approx(vector(oracle, ids), abs=1e-5)
    for end, one in enumerate(each, 1):
        first = vector(oracle, ids[:end])[:8]
        assert one == pytest.approx([value / math.hypot(*first) for value in first], abs=1e-5)
    assert len(each) == len(ids)


@pytest.mark.covers("A1.11")
def test_chats_and_vectors_are_served_side_by_side(served: Served, oracle: Oracle) -> None:
    answered, expected = served.chat_text(), pytest.approx(vector(oracle, oracle.tokenizer.encode(PROMPT)), abs=1e-5)

    for _ in range(3):
        assert posted(served, "/v1/embeddings", input=PROMPT)["data"][0]["embedding"] == expected
        assert served.chat_text() == answered


@pytest.mark.covers("B.tokenizer.1", "B.tokenizer.2", "B.tokenizer.3")
def test_tokens_are_those_of_transformers_and_back(served: Served, oracle: Oracle) -> None:
    reported = posted(served, "/tokenize", prompt=PROMPT, return_token_strs=True)
    chat = posted(served, "/tokenize", messages=CHAT)

    ids = oracle.tokenizer.encode(PROMPT)
    assert reported == {
        "count": len(ids), "max_model_len": 512, "tokens": ids,
        "token_strs": oracle.tokenizer.convert_ids_to_tokens(ids),
    }  # fmt: skip
    assert chat["tokens"] == oracle.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert posted(served, "/detokenize", tokens=ids) == {"prompt": oracle.tokenizer.decode(ids)}


def test_b_tokenizer_its_config_is_shown_by_flag(served: Served, oracle: Oracle) -> None:
    info = served.http.get("/tokenizer_info").json()

    own = oracle.tokenizer
    assert (info["eos_token"], info["chat_template"]) == (own.eos_token, own.chat_template)


@pytest.mark.long
def test_b_tokenizer_lm_evals_remote_tokenizer_is_the_models_own(served: Served, oracle: Oracle) -> None:
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("missing tool: lm-eval (pip install 'pdserve[clients]')")
    from lm_eval.utils import RemoteTokenizer, check_remote_tokenizer_support

    url = f"{served.http.base_url}/v1/completions"
    assert check_remote_tokenizer_support(url)
    remote, own = RemoteTokenizer(url), oracle.tokenizer
    ids = own.encode(PROMPT, add_special_tokens=False)
    assert remote.encode(PROMPT) == ids
    assert remote.decode(ids) == PROMPT
    assert remote.eos_token_id == own.eos_token_id
    text = own.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert remote.apply_chat_template(CHAT) == text


@pytest.mark.covers("B.clients.1", "A2.34")
def test_the_official_client_embeds_and_retrieves(served: Served, oracle: Oracle) -> None:
    with openai.OpenAI(base_url=f"{served.http.base_url}/v1", api_key="EMPTY", max_retries=0) as client:
        answer = client.embeddings.create(model="tiny", input=TEXTS)
        model = client.models.retrieve("tiny")
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="gpt-9", input="a")

    expected = [vector(oracle, oracle.tokenizer.encode(text)) for text in TEXTS]
    for one, values in zip(answer.data, expected, strict=True):
        assert one.embedding == pytest.approx(values, abs=1e-5)
    assert (model.id, model.object) == ("tiny", "model")


@pytest.mark.covers("B.ops.1", "B.ops.3", "B.ops.4", "B.ops.5", "B.ops.6")
def test_version_ping_load_and_the_api_are_reported(served: Served) -> None:
    assert served.http.get("/version").json()["version"]
    assert served.http.get("/ping").status_code == served.http.get("/health").status_code == 200
    assert served.http.get("/load").json() == {"server_load": 0}
    paths = served.http.get("/openapi.json").json()["paths"]
    assert {"/v1/embeddings", "/v1/score", "/tokenize", "/detokenize", "/v1/models/{name}"} <= set(paths)
