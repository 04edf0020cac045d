"""A1: files of requests, answered by a model in the command's own process and by a P/D cluster at --base-url."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from batch.app_backend import AppBackend
from batch.job import BatchJob
from batch.prepared_job import prepare
from batch.runner import run_batch
from flags.options import EngineOptions
from pdserve.inner_app import inner_app
from scheduler.config import SchedulerOptions
from tests.cluster.conftest import ENGINE_FLAGS
from tests.conformance.conftest import FLAGS
from tests.conformance.test_encoders import save_words
from tests.engine.tiny_encoders import make_bert
from tests.pdserve.batches import Ended, chat, read, request, run, run_here, without_ids, write

pytestmark = pytest.mark.cluster

WAYS = ("in this process", "P/D")
UNHELPFUL = "You are an unhelpful assistant."
TEXTS = ["The capital of Brazil is Brasilia.", "The capital of France is Paris."]
QUESTION = "What is the capital of France?"
MIXED: list[dict[str, Any]] = [
    chat("helpful", max_completion_tokens=5),
    request("vector", "/v1/embeddings", input="You are a helpful assistant."),
    request("scores", "/v1/score", text_1=QUESTION, text_2=TEXTS),
    chat("unhelpful", UNHELPFUL, max_tokens=3),
    request("bad url", "/bad_url", prompt="a"),
    request("text", "/v1/completions", prompt="San Francisco is a", max_tokens=7),
    chat("streamed", stream=True),
    chat("another model", model="gpt-9"),
    request("vector again", "/v1/embeddings", input="You are a helpful assistant."),
    {"custom_id": "got", "method": "GET", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "a"}},
    {"custom_id": "no object", "method": "POST", "url": "/v1/completions", "body": "tiny"},
    request("wrong field", "/v1/completions", prompt="a", max_tokens=-1),
    request("other scores", "/score", text_1=QUESTION, text_2=TEXTS),
]  # fmt: skip
GOOD = ("helpful", "vector", "scores", "unhelpful", "text", "vector again", "other scores")
LINE_SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["id", "custom_id", "response", "error"],
    "properties": {
        "id": {"type": "string", "pattern": "^pdserve-[0-9a-f]{16,}$"},
        "custom_id": {"type": "string"},
        "response": {
            "type": ["object", "null"],
            "additionalProperties": False,
            "required": ["status_code", "request_id", "body"],
            "properties": {
                "status_code": {"type": "integer"},
                "request_id": {"type": "string", "pattern": "^pdserve-batch-[0-9a-f]{16,}$"},
                "body": {"type": ["object", "null"]},
            },
        },
        "error": {"type": ["object", "null"]},
    },
}

Lines = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def inner_flags(model: Path) -> tuple[str, ...]:
    """The flags of a model in the command's own process."""
    return ("--model", str(model), "--served-model-name", "tiny", *ENGINE_FLAGS, *FLAGS)


@pytest.fixture(scope="session")
def flags_of(request: pytest.FixtureRequest, inner_flags: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """Return the flags of a way to answer."""

    def flags(way: str) -> tuple[str, ...]:
        return inner_flags if way == WAYS[0] else ("--base-url", request.getfixturevalue("pair"))

    return flags


@pytest.fixture(scope="session")
def ended() -> dict[str, tuple[Ended, list[dict[str, Any]]]]:
    """The exit status and output of the mixed file in each way, once it ran."""
    return {}


@pytest.fixture(params=WAYS)
def way(
    request: pytest.FixtureRequest, flags_of: Callable[[str], tuple[str, ...]],
    tmp_path_factory: pytest.TempPathFactory, ended: dict[str, tuple[Ended, list[dict[str, Any]]]],
) -> tuple[Ended, list[dict[str, Any]]]:  # fmt: skip
    """The result of the mixed file in one way, in this process, then in the other, by a module form."""
    name = request.param
    if name not in ended:
        folder = tmp_path_factory.mktemp("batch")
        source = write(folder / "in.jsonl", ["", *(json.dumps(line) for line in MIXED[:3]), "", "  ", *MIXED[3:], ""])
        words: tuple[str | Path, ...] = ("-i", source, "-o", folder / "out.jsonl", *flags_of(name))
        here = name == WAYS[0]
        output = run_here(folder, *words) if here else run(folder, "-m", "pdserve.endpoints.openai.run_batch", *words)
        assert output.status == 0, output.err
        ended[name] = output, read(folder / "out.jsonl")
    return ended[name]


@pytest.fixture
def answered(way: tuple[Ended, list[dict[str, Any]]]) -> Lines:
    """The output by custom_id."""
    return {line["custom_id"]: line for line in way[1]}


def body(line: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a line that was answered successfully."""
    assert (line["error"], line["response"]["status_code"]) == (None, 200)
    answer: dict[str, Any] = line["response"]["body"]
    return answer


@pytest.mark.covers("A1.1")
def test_every_line_is_answered_once_in_order_except_blank_ones(
    way: tuple[Ended, list[dict[str, Any]]],
) -> None:
    assert [line["custom_id"] for line in way[1]] == [line["custom_id"] for line in MIXED]


@pytest.mark.covers("A1.2")
def test_the_command_ends_with_0_and_prints_what_it_did(way: tuple[Ended, list[dict[str, Any]]]) -> None:
    counts = f"{len(MIXED)} lines answered ({len(MIXED) - len(GOOD)} errors)"

    assert way[0].status == 0
    assert re.fullmatch(re.escape(counts) + r" in \d+\.\d s, \d+\.\d tokens/s: \S+/out\.jsonl\n", way[0].out)
    assert "%|" not in way[0].err, "no bar without a terminal"
    assert re.search(r"^the first error is '[^']+': \S", way[0].err, re.MULTILINE)


@pytest.mark.covers("A1.3")
def test_both_module_forms_and_both_ways_give_the_same(
    way: tuple[Ended, list[dict[str, Any]]], ended: dict[str, tuple[Ended, list[dict[str, Any]]]]
) -> None:
    first = ended[WAYS[0]][1] if WAYS[0] in ended else way[1]

    for line, other in zip(way[1], first, strict=True):
        assert_alike(without_ids(line), without_ids(other))


@pytest.mark.covers("A1.5")
def test_both_names_of_the_limit_cap_the_output(answered: Lines) -> None:
    for name, limit in (("helpful", 5), ("unhelpful", 3), ("text", 7)):
        answer = body(answered[name])
        assert answer["usage"]["completion_tokens"] == limit
        assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.covers("A1.6")
def test_every_line_has_the_envelope_and_its_own_id(way: tuple[Ended, list[dict[str, Any]]]) -> None:
    for line in way[1]:
        jsonschema.validate(line, LINE_SCHEMA)
        assert (line["error"] is None) is (line["custom_id"] in GOOD)
    ids = [line["id"] for line in way[1]]
    ids += [line["response"]["request_id"] for line in way[1] if line["response"] is not None]
    assert len(set(ids)) == len(ids)


@pytest.mark.covers("A1.7", "A1.8")
def test_a_chat_has_every_field(answered: Lines) -> None:
    for name in ("helpful", "unhelpful"):
        answer = body(answered[name])
        (choice,) = answer["choices"]
        usage = answer["usage"]
        assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
        assert isinstance(answer["created"], int)
        assert answer["id"].startswith("chatcmpl-")
        assert choice["message"]["role"] == "assistant"
        assert isinstance(choice["message"]["content"], str)
        assert (choice["index"], choice["logprobs"], choice["stop_reason"]) == (0, None, None)
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.covers("A1.9", "A1.11")
def test_vectors_are_mixed_with_chats_and_repeat(answered: Lines) -> None:
    first, again = body(answered["vector"]), body(answered["vector again"])

    assert (first["object"], first["id"][:5], first["model"]) == ("list", "embd-", "tiny")
    (one,) = first["data"]
    assert (one["index"], one["object"], len(one["embedding"])) == (0, "embedding", 64)
    assert again["data"][0]["embedding"] == pytest.approx(one["embedding"], abs=1e-6)
    tokens = first["usage"]["prompt_tokens"]
    assert first["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}


@pytest.mark.covers("A1.10", "A1.11")
def test_scores_are_mixed_with_chats_by_both_paths(answered: Lines) -> None:
    answer, other = body(answered["scores"]), body(answered["other scores"])

    assert (answer["object"], answer["id"][:6]) == ("list", "score-")
    assert [(one["index"], one["object"]) for one in answer["data"]] == [(0, "score"), (1, "score")]
    assert all(-1 <= one["score"] <= 1 for one in answer["data"])
    assert [one["score"] for one in other["data"]] == pytest.approx([one["score"] for one in answer["data"]], abs=1e-5)
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens_details"] is None


@pytest.mark.covers("A1.12")
def test_a_line_to_another_model_is_404_and_the_run_continues(answered: Lines) -> None:
    line = answered["another model"]

    assert line["response"]["status_code"] == 404
    assert "gpt-9" in line["error"]["message"]
    assert set(GOOD) <= {name for name, one in answered.items() if one["error"] is None}


@pytest.mark.covers("A1.21")
def test_an_unknown_endpoint_is_that_lines_error(answered: Lines) -> None:
    line = answered["bad url"]

    assert line["response"]["status_code"] == 400
    message = line["error"]["message"]
    assert message.startswith("URL /bad_url is not a supported endpoint. Supported endpoints: ")
    for url in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/score"):
        assert url in message


@pytest.mark.covers("A1.22")
def test_a_line_that_requests_a_stream_is_that_lines_error(answered: Lines) -> None:
    assert "Request must not be sent in stream mode" in answered["streamed"]["error"]["message"]


@pytest.mark.covers("A1.24")
@pytest.mark.parametrize(("name", "words"), [("got", "POST"), ("no object", "body"), ("wrong field", "max_tokens")])
def test_an_invalid_request_is_that_lines_error(answered: Lines, name: str, words: str) -> None:
    assert answered[name]["response"]["status_code"] == 400
    assert words in answered[name]["error"]["message"]


@pytest.mark.covers("A1.23")
def test_an_endpoint_that_the_model_lacks_is_that_lines_error(tmp_path: Path) -> None:
    model = make_bert(tmp_path / "bert")
    save_words(model)
    write(tmp_path / "in.jsonl", [request("vector", "/v1/embeddings", input="w1 w2"), chat("chat")])
    job = BatchJob(tmp_path / "in.jsonl", tmp_path / "out.jsonl")

    async def answer() -> None:
        engine = EngineOptions(model=str(model), served_model_name=("tiny",), dtype="float32")
        async with inner_app(engine, SchedulerOptions()) as app:
            with prepare(job) as prepared:
                await run_batch(prepared, AppBackend(app), on_progress=lambda progress: None)

    asyncio.run(answer())
    vector, refused = read(tmp_path / "out.jsonl")

    assert len(body(vector)["data"][0]["embedding"]) == 24
    assert refused["response"]["status_code"] == 400
    assert "makes vectors; /v1/chat/completions needs one that generates text" in refused["error"]["message"]


def assert_alike(one: Any, other: Any) -> None:
    """Fail unless both are equal, except for the rounding of sums in another order."""
    if isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys()
        one, other = list(one.values()), list(other.values())
    if isinstance(one, list) and isinstance(other, list):
        for mine, theirs in zip(one, other, strict=True):
            assert_alike(mine, theirs)
    else:
        assert one == (pytest.approx(other, abs=1e-5) if isinstance(other, float) else other)
