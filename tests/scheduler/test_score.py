"""POST /v1/score and /score over a scripted dispatcher, whose vectors are (sum of the ids, number of ids)."""

import math
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from simulation.prompt import simulated_vector
from tests.scheduler.conftest import Served
from tests.scheduler.test_embeddings import write_architecture
from wire.types import Pooling

pytestmark = pytest.mark.anyio


async def post(served: Served, path: str = "/v1/score", **fields: Any) -> Any:
    """Return the body of a successful answer."""
    response = await served.client.post(path, json={"model": served.model} | fields)
    assert response.status_code == 200, response.text
    return response.json()


async def refusal(served: Served, **fields: Any) -> Any:
    """Return the error of a 400."""
    response = await served.client.post("/v1/score", json={"model": served.model} | fields)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def angle(first: tuple[float, ...], second: tuple[float, ...]) -> float:
    """Return the cosine of two vectors of two values, from their angles."""
    return math.cos(math.atan2(first[1], first[0]) - math.atan2(second[1], second[0]))


@pytest.fixture
def cross_encoder(make_model: Any) -> Path:
    """A folder whose architecture scores pairs, and whose tokenizer has a slot for each text."""
    folder: Path = make_model(chat_template=None)
    write_architecture(folder, "BertForSequenceClassification", num_labels=1)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = [(text, tokenizer.token_to_id(text)) for text in ("<|im_start|>", "<|im_end|>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", pair="<|im_start|> $A <|im_end|> $B:1 <|im_end|>:1", special_tokens=ends
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.covers("A1.10")
@pytest.mark.parametrize("path", ["/v1/score", "/score"])
async def test_one_text_is_scored_against_several(serve: Any, path: str) -> None:
    async with serve() as served:
        answer = await post(served, path, text_1="hello", text_2=["hello", "good morning"])

        hello, morning = served.ids("hello"), served.ids("good morning")
        assert answer["object"] == "list"
        assert answer["id"].startswith("score-")
        assert answer["model"] == served.model
        assert [(one["index"], one["object"]) for one in answer["data"]] == [(0, "score"), (1, "score")]
        expected = [1.0, angle(simulated_vector(hello), simulated_vector(morning))]
        assert [one["score"] for one in answer["data"]] == pytest.approx(expected)
        total = 2 * len(hello) + len(morning)
        assert answer["usage"] == {
            "prompt_tokens": total, "total_tokens": total, "completion_tokens": 0, "prompt_tokens_details": None,
        }  # fmt: skip
        assert served.dispatcher.requests[0].prompts == (hello, hello, morning)


@pytest.mark.covers("B.pooling.2")
@pytest.mark.parametrize("names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")])
async def test_every_spelling_of_a_pair_gives_the_same_scores(serve: Any, names: tuple[str, str]) -> None:
    async with serve() as served:
        fields: Any = dict(zip(names, ("hello", ["good morning", "hello"]), strict=True))
        spelled = await post(served, **fields)
        printed = await post(served, text_1="hello", text_2=["good morning", "hello"])

        assert spelled["data"] == printed["data"]
        for given, missing in (names, names[::-1]):
            error = await refusal(served, **{given: "hello"})
            expected = missing if given != "queries" else "documents"
            assert (error["param"], error["message"]) == (expected, f"{expected} is missing")


async def test_a_limit_for_each_text_keeps_its_first_tokens(serve: Any, cross_encoder: Path) -> None:
    limits: Any = {"max_tokens_per_query": 2, "max_tokens_per_doc": 3}
    async with serve() as served:
        fox, hello = served.ids("the quick brown fox"), served.ids("hello")
        await post(served, text_1="the quick brown fox", text_2=["the quick brown fox", "hello"], **limits)

        assert served.dispatcher.requests[0].prompts == (fox[:2], fox[:3], hello)
        for name, limit in (("max_tokens_per_doc", 512), ("max_tokens_per_query", -1)):
            error = await refusal(served, text_1="a", text_2="b", **{name: limit})
            words = f"{name} is {limit}, but must be from 0 to 511, below the model's maximum length"
            assert (error["param"], error["message"]) == (name, words)
    async with serve(folder=cross_encoder) as served:
        await post(served, text_1="the quick brown fox", text_2="the quick brown fox", use_activation=False, **limits)

        begin, end = served.ids("<|im_start|>"), served.ids("<|im_end|>")
        request = served.dispatcher.requests[0]
        assert request.prompts == ((*begin, *fox[:2], *end, *fox[:3], *end),)
        assert request.poolings == (Pooling("classify", normalize=False, second_text=4),)


async def test_lists_of_equal_length_are_scored_pair_by_pair(serve: Any) -> None:
    async with serve() as served:
        answer = await post(served, text_1=["hello", "good morning"], text_2=["the quick brown fox", "hello"])

        vectors = {
            text: simulated_vector(served.ids(text)) for text in ("hello", "good morning", "the quick brown fox")
        }
        expected = [
            angle(vectors["hello"], vectors["the quick brown fox"]), angle(vectors["good morning"], vectors["hello"]),
        ]  # fmt: skip
        assert [one["score"] for one in answer["data"]] == pytest.approx(expected)


async def test_a_cross_encoder_reads_both_texts_as_one_prompt(serve: Any, cross_encoder: Path) -> None:
    async with serve(folder=cross_encoder) as served:
        answer = await post(served, text_1="hello", text_2=["good morning", "hello"])

        begin, end = served.ids("<|im_start|>"), served.ids("<|im_end|>")
        hello, morning = served.ids("hello"), served.ids("good morning")
        pairs = tuple((*begin, *hello, *end, *second, *end) for second in (morning, hello))
        request = served.dispatcher.requests[0]
        assert request.prompts == pairs
        assert request.poolings == (Pooling("classify", second_text=len(hello) + 2),) * 2
        assert [one["score"] for one in answer["data"]] == [simulated_vector(pair)[0] for pair in pairs]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, pairs))


async def test_a_pair_that_is_too_long_is_truncated(serve: Any, cross_encoder: Path) -> None:
    async with serve(folder=cross_encoder) as served:
        first, second = "the quick brown fox", "hello"
        room = 3 + len(served.ids(second)) + 2

        await post(served, text_1=first, text_2=second, truncate_prompt_tokens=room)

        begin, end = served.ids("<|im_start|>"), served.ids("<|im_end|>")
        pair = (*begin, *served.ids(first)[:2], *end, *served.ids(second), *end)
        assert served.dispatcher.requests[0].prompts == (pair,)
        error = await refusal(served, text_1="hello " * 400, text_2=second)
        assert "maximum context length is 512 tokens" in error["message"]
        assert "are at least" in (await refusal(served, text_1="hello " * 2000, text_2=second))["message"]
        await post(served, text_1="hello " * 400, text_2=second, truncate_prompt_tokens=-1)
        assert len(served.dispatcher.requests[1].prompts[0]) == 512


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"text_2": "a"}, "text_1", "text_1 is missing"),
        ({"text_1": "a", "text_2": []}, "text_2", "a string or a list of strings, none empty"),
        ({"text_1": "a", "text_2": ["b", ""]}, "text_2", "text 1 is empty"),
        ({"text_1": "a", "text_2": [1, 2]}, "text_2", "a string or a list of strings"),
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "text_1 has 2 texts, but text_2 has 1"),
        ({"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_1", "text_1 has 2 texts, but text_2 has 3"),
        ({"text_1": "a", "text_2": ["b"] * 5}, "text_2", "text_2 has 5 texts, but the limit is 4 (--max-inputs)"),
        ({"text_1": "hello " * 2000, "text_2": "b"}, "text_1", "maximum context length is 512 tokens"),
        ({}, "text_1", "text_1 is missing"),
        ({"data_2": "a"}, "data_1", "data_1 is missing"),
        ({"text_1": "a", "text_2": "b", "items": "c"}, "items", "already in text_1 and text_2"),
        ({"queries": "a", "documents": [{"content": []}]}, "documents", "a string or a list of strings"),
        ({"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "from 1 to 512"),
    ],
)
async def test_invalid_fields_are_refused_by_name(serve: Any, fields: Any, param: str, words: str) -> None:
    async with serve(max_inputs=4) as served:
        error = await refusal(served, **fields)

        assert error["param"] == param
        assert words in error["message"]
        assert not served.dispatcher.requests
