"""A batch over the scheduler's own app: a line is answered as its HTTP request would be, good or bad."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from batch.app_backend import AppBackend
from batch.backend import BatchBackend
from batch.job import BatchJob
from batch.prepared_job import prepare
from batch.request_line import ENDPOINTS
from batch.runner import run_batch
from batch.url_backend import UrlBackend
from testing.scheduler.scripted_dispatcher import ScriptedDispatcher
from tests.batch.app_server import DEADLINE_S, serving
from tests.batch.real_app import NAME, real_app
from tests.batch.scripted import AT_ONCE, ignore, read_lines, write_lines
from tests.scheduler.conftest import write_model
from tests.scheduler.test_embeddings import write_architecture
from tests.scheduler.vision_model import PNG, chat, data_url, image_part, write_vision_model
from wire.errors import Overloaded

pytestmark = pytest.mark.anyio
CHAT, COMPLETION, EMBEDDING = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
HELLO = [{"role": "user", "content": "hello"}]
GOOD = (
    (CHAT, {"messages": HELLO, "max_completion_tokens": 9}),
    (COMPLETION, {"prompt": "hello", "max_tokens": 2}),
    (EMBEDDING, {"input": ["hello", "world"]}),
    ("/v1/score", {"text_1": "hello", "text_2": ["world", "hello"]}),
    ("/score", {"text_1": "hello", "text_2": "world"}),
    ("/v2/rerank", {"query": "hello", "documents": ["world", {"text": "hello"}], "top_n": 1}),
    ("/pooling", {"input": "hello", "task": "token_embed"}),
    (CHAT, {"messages": HELLO, "n": 2, "logprobs": True, "top_logprobs": 2}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 9}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 9}),
)
IMAGE = image_part(data_url())


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that generates text."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def vector_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that makes vectors and no text."""
    folder = write_model(tmp_path_factory.mktemp("encoder"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaModel"]}))
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two classes."""
    folder = write_model(tmp_path_factory.mktemp("classifier"))
    write_architecture(folder, "Qwen3ForSequenceClassification", id2label={"0": "bad", "1": "good"})
    return folder


@asynccontextmanager
async def _backend_and_cluster(
    folder: Path, by_url: bool = False, **options: Any
) -> AsyncIterator[tuple[BatchBackend, ScriptedDispatcher]]:  # fmt: skip
    async with real_app(folder, **options) as (app, dispatcher):
        if not by_url:
            yield AppBackend(app), dispatcher
            return
        async with serving(app) as url, UrlBackend(url) as backend:
            yield backend, dispatcher


def _job(folder: Path, *lines: tuple[str, dict[str, Any]]) -> BatchJob:
    objects = [
        {"custom_id": f"r{i}", "method": "POST", "url": url, "body": {"model": NAME} | body}
        for i, (url, body) in enumerate(lines)
    ]
    return BatchJob(write_lines(folder / "in.jsonl", objects), folder / "out.jsonl", retries=AT_ONCE)


async def _run(job: BatchJob, backend: BatchBackend) -> list[dict[str, Any]]:
    with prepare(job) as prepared:
        await run_batch(prepared, backend, on_progress=ignore)
    return read_lines(job.output_path)


def _stripped(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line without what differs from run to run."""
    del line["id"], line["response"]["request_id"]
    body = line["response"]["body"]
    for part in (body, *body.get("output", ())):
        for name in ("id", "created", "created_at", "completed_at"):
            part.pop(name, None)
    return line


@pytest.mark.covers("A1.11")
@pytest.mark.parametrize("by_url", [False, True], ids=["app", "url"])
async def test_all_endpoints_are_answered_in_one_file_in_order(
    text_model: Path, tmp_path: Path, by_url: bool
) -> None:  # fmt: skip
    async with _backend_and_cluster(text_model, by_url) as (backend, _):
        lines = await _run(_job(tmp_path, *GOOD), backend)

    assert [line["response"]["status_code"] for line in lines] == [200] * len(GOOD)
    *others, message = (line["response"]["body"] for line in lines)
    assert others[5].keys() == {"id", "model", "results", "usage"}
    kinds = [body["object"] for body in (*others[:5], *others[6:])]
    assert kinds == ["chat.completion", "text_completion", *["list"] * 4, "chat.completion", "response"]
    assert (message["type"], message["content"][0]["text"]) == ("message", "hello world")
    assert [line["custom_id"] for line in lines] == [f"r{i}" for i in range(len(GOOD))]
    assert lines[0]["response"]["body"]["choices"][0]["message"]["content"] == "hello world"
    assert len(lines[7]["response"]["body"]["choices"]) == 2


async def test_each_endpoint_may_be_that_of_a_line(text_model: Path, classifier: Path, tmp_path: Path) -> None:
    query = {"query": "hello", "documents": ["world"]}
    more = (("/rerank", query), ("/v1/rerank", query), ("/v2/embed", {"texts": ["hello"]}))
    classify = ("/classify", {"input": "hello"})
    async with _backend_and_cluster(text_model) as (backend, _):
        lines = await _run(_job(tmp_path, *more), backend)
    async with _backend_and_cluster(classifier) as (backend, _):
        lines += await _run(_job(tmp_path, classify), backend)

    assert [line["response"]["status_code"] for line in lines] == [200] * 4, lines
    assert {url for url, _ in (*GOOD, *more, classify)} == set(ENDPOINTS)


async def test_an_app_and_a_server_give_the_same_lines(text_model: Path, tmp_path: Path) -> None:
    files = []
    for by_url in (False, True):
        async with _backend_and_cluster(text_model, by_url) as (backend, _):
            files.append([_stripped(line) for line in await _run(_job(tmp_path, *GOOD), backend)])

    assert files[0] == files[1]


@pytest.mark.covers("B.tools.8")
@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ('[{"name": "f", "parameters": {"a": 1}}]', {"tool_choice": "required"}),
        ('{"a": 1}', {"tool_choice": {"function": {"name": "f"}}}),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', {}),
    ],
    ids=["required", "named", "auto"],
)
async def test_a_line_may_call_tools(text_model: Path, tmp_path: Path, text: str, choice: dict[str, Any]) -> None:
    body = {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]} | choice
    async with _backend_and_cluster(text_model, text=text, tool_call_parser="hermes") as (backend, _):
        lines = await _run(_job(tmp_path, (CHAT, body), (CHAT, body | {"tools": []})), backend)

    (call,) = lines[0]["response"]["body"]["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert lines[1]["response"]["body"]["error"]["param"] == "tools"


@pytest.mark.covers("B.tools.8")
@pytest.mark.parametrize(
    ("url", "body", "kind"),
    [
        ("/v1/messages", {"messages": HELLO, "max_tokens": 99, "tools": [{"name": "f", "input_schema": {}}],
                          "tool_choice": {"type": "any"}}, "tool_use"),
        ("/v1/responses", {"input": "hello", "tools": [{"type": "function", "name": "f"}], "tool_choice": "required"},
         "function_call"),
    ],
)  # fmt: skip
async def test_a_line_of_another_api_may_call_tools(
    text_model: Path, tmp_path: Path, url: str, body: dict[str, Any], kind: str
) -> None:
    text = '[{"name": "f", "parameters": {"a": 1}}]'
    async with _backend_and_cluster(text_model, text=text) as (backend, _):
        (line,) = await _run(_job(tmp_path, (url, body)), backend)

    answer = line["response"]["body"]
    (call,) = answer.get("content") or answer["output"]
    assert (call["type"], call["name"]) == (kind, "f")
    assert (call.get("input") or json.loads(call["arguments"])) == {"a": 1}


async def test_a_line_may_think(text_model: Path, tmp_path: Path) -> None:
    text = "<think>Hm.</think>Yes."
    async with _backend_and_cluster(text_model, text=text, reasoning_parser="qwen3") as (backend, _):
        (line,) = await _run(_job(tmp_path, (CHAT, {"messages": HELLO})), backend)

    message = line["response"]["body"]["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Yes.")


async def test_a_lines_id_is_the_one_in_its_answer(text_model: Path, tmp_path: Path) -> None:
    async with _backend_and_cluster(text_model) as (backend, _):
        (line,) = await _run(_job(tmp_path, GOOD[0]), backend)

    response = line["response"]
    assert response["body"]["id"] == f"chatcmpl-{response['request_id']}"


@pytest.mark.parametrize("by_url", [False, True], ids=["app", "url"])
async def test_a_line_without_a_model_is_of_the_served_one(text_model: Path, tmp_path: Path, by_url: bool) -> None:
    lines = [{"custom_id": f"r{i}", "method": "POST", "url": url, "body": body} for i, (url, body) in enumerate(GOOD)]
    job = BatchJob(write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", retries=AT_ONCE)

    async with _backend_and_cluster(text_model, by_url=by_url) as (backend, _):
        answers = await _run(job, backend)

    assert [line["error"] for line in answers] == [None] * len(GOOD)
    assert {line["response"]["body"]["model"] for line in answers} == {NAME}


@pytest.mark.covers("A1.12")
async def test_a_line_of_another_model_fails_alone(text_model: Path, tmp_path: Path) -> None:
    foreign = (CHAT, {"messages": HELLO, "model": "other"})

    async with _backend_and_cluster(text_model) as (backend, _):
        first, second, third = await _run(_job(tmp_path, GOOD[0], foreign, GOOD[1]), backend)

    assert (first["error"], third["error"]) == (None, None)
    assert second["response"]["status_code"] == 404
    assert second["error"]["param"] == "model"
    assert "other" in second["error"]["message"]


@pytest.mark.parametrize("by_url", [False, True], ids=["app", "url"])
@pytest.mark.parametrize("named", [{}, {"model": None}], ids=["absent", "null"])
async def test_a_line_without_a_model_uses_the_served_one(
    text_model: Path, tmp_path: Path, by_url: bool, named: dict[str, Any]
) -> None:
    job = _job(tmp_path, *GOOD)
    objects = read_lines(job.input_path)
    for one in objects:
        del one["body"]["model"]
        one["body"] |= named
    write_lines(job.input_path, objects)

    async with _backend_and_cluster(text_model, by_url) as (backend, _):
        lines = await _run(job, backend)

    assert [line["error"] for line in lines] == [None] * len(GOOD)
    assert {line["response"]["body"]["model"] for line in lines} == {NAME}


@pytest.mark.covers("A1.23")
@pytest.mark.parametrize(("url", "body"), GOOD[:2])
async def test_an_endpoint_that_the_model_lacks_is_the_lines_error(
    vector_model: Path, tmp_path: Path, url: str, body: dict[str, Any]
) -> None:  # fmt: skip
    async with _backend_and_cluster(vector_model) as (backend, _):
        good, bad = await _run(_job(tmp_path, GOOD[2], (url, body)), backend)

    assert good["error"] is None
    assert bad["response"]["status_code"] == 400
    assert bad["error"]["message"].startswith(f"Model does not support endpoint {url}: the model makes vectors")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": HELLO, "temperature": -1}, "temperature"),
        ({"messages": HELLO, "kv_transfer_params": {}}, "kv_transfer_params"),
        ({"messages": HELLO, "api_base": "http://169.254.169.254/", "n": 0}, "n"),
        ({"messages": "hello"}, "messages"),
        ({}, "messages"),
    ],
)
async def test_a_body_is_checked_as_over_http(
    text_model: Path, tmp_path: Path, body: dict[str, Any], param: str
) -> None:  # fmt: skip
    async with _backend_and_cluster(text_model) as (backend, dispatcher):
        over_http = await backend.send("POST", CHAT, json.dumps({"model": NAME} | body).encode())
        (line,) = await _run(_job(tmp_path, (CHAT, body)), backend)

    assert line["response"]["status_code"] == over_http.status == 400
    assert line["error"] == json.loads(over_http.body)["error"]
    assert line["error"]["param"].startswith(param)
    assert not dispatcher.requests


async def test_a_nesting_bomb_inside_a_body_is_that_lines_error(text_model: Path, tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(500):
        deep = [deep]

    async with _backend_and_cluster(text_model) as (backend, _):
        (line,) = await _run(_job(tmp_path, (CHAT, {"messages": HELLO, "metadata": deep})), backend)

    assert "nested deeper than" in line["error"]["message"]


@pytest.mark.parametrize(("at", "status"), [(0, 429), (-1, 529)], ids=["chat", "message"])
async def test_a_full_queue_is_waited_out(text_model: Path, tmp_path: Path, at: int, status: int) -> None:
    async with _backend_and_cluster(text_model) as (backend, dispatcher):
        dispatcher.refuse_with = Overloaded("the queue is full", retry_after_s=1)
        path, body = GOOD[at]
        reported = await backend.send("POST", path, json.dumps({"model": NAME, **body}).encode())
        full = await _run(_job(tmp_path, GOOD[at]), backend)
        dispatcher.refuse_with = None
        (line,) = await _run(_job(tmp_path, GOOD[at]), backend)

    assert (reported.status, reported.headers["retry-after"]) == (status, "1")
    assert full[0]["response"]["status_code"] == status
    assert line["error"] is None


@pytest.mark.parametrize("by_url", [False, True], ids=["app", "url"])
async def test_a_cancelled_run_cancels_the_apps_work(text_model: Path, tmp_path: Path, by_url: bool) -> None:
    async with _backend_and_cluster(text_model, by_url) as (backend, dispatcher), asyncio.timeout(DEADLINE_S):
        dispatcher.hold_after = 1
        running = asyncio.ensure_future(_run(_job(tmp_path, GOOD[0]), backend))
        await dispatcher.held.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await dispatcher.closed.wait()

    assert dispatcher.outcomes == ["cancelled"]


@pytest.mark.covers("B.images.10")
async def test_a_line_may_have_images_and_a_bad_one_fails_alone(tmp_path: Path) -> None:
    bad = image_part(data_url(b"<svg/>"))
    lines = [(CHAT, {"messages": chat("what?", part)}) for part in (IMAGE, bad, IMAGE)]
    async with _backend_and_cluster(write_vision_model(tmp_path / "vision")) as (backend, dispatcher):
        good, refused, again = await _run(_job(tmp_path, *lines), backend)

    assert [line["response"]["status_code"] for line in (good, refused, again)] == [200, 400, 200]
    assert refused["response"]["body"]["error"]["param"] == "messages.0.content.1"
    assert [request.images[0][0].data for request in dispatcher.requests] == [PNG, PNG]
