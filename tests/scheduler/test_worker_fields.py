"""The fields of a request over vLLM workers, each by leg: what reaches prefill, what decode, and what is refused."""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from flags.options import EngineOptions
from scheduler.app import build_app
from scheduler.app_context import AppContext, ReadyReport
from scheduler.config import SchedulerConfig, SchedulerOptions
from scheduler.http.keys import Keys
from scheduler.limits import ControlLimits
from scheduler.model.files import read_model_files
from scheduler.observability.metrics import Metrics
from scheduler.serving import open_images
from scheduler.tokens import Tokens
from testing.vllm_worker.settings import WorkerSettings
from tests.scheduler.vision_model import chat, data_url, image_part
from tests.scheduler.worker_cluster import WorkerCluster, leg_id, with_fake

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TEXT = "the quick brown fox jumps over the lazy dog"
SAMPLED = {"temperature": 0.8, "seed": 5}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
PICTURED = {"messages": chat(TEXT, image_part(data_url(), detail="low"))}
NO_VECTORS = "vectors and scores are not available over workers"
ABSENT, PRESENT = "absent", "present"
"""What is checked of a key in place of its value."""


@asynccontextmanager
async def served(
    model_folder: Path, roles: str = "PD", limits: ControlLimits | None = None,
    settings: WorkerSettings | None = None, has_workers: Callable[[], bool] = lambda: True, **options: Any,
) -> AsyncIterator[tuple[httpx.AsyncClient, WorkerCluster]]:  # fmt: skip
    """The HTTP API over workers, by default one of each role; images are loaded while `has_workers`."""
    settings = settings or with_fake(vocab_size=400, max_model_len=512, takes_images=True)
    async with WorkerCluster(roles, settings, limits=limits).serving() as cluster:
        config = SchedulerConfig(EngineOptions(model=str(model_folder)), SchedulerOptions(**options))
        tokens = Tokens(read_model_files(str(model_folder)), config.options.chat_settings(keyed=False))
        images = open_images(config.options, str(model_folder), tokens.files.vision, has_workers)
        context = AppContext(
            config, cluster.control.dispatch, tokens, Metrics(), lambda: ReadyReport(True), images=images,
            keys=Keys(config.options.api_key),
        )  # fmt: skip
        transport = httpx.ASGITransport(build_app(context), raise_app_exceptions=False)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                yield client, cluster
        finally:
            await tokens.close()
            await images.close()


@dataclass(frozen=True)
class Field:
    """One field: the request, its legs of each role, and of their bodies what is checked.

    `scored` is the request for log probabilities of the prompt, before the legs.
    """

    body: Mapping[str, Any]
    prefill: Mapping[str, Any] = field(default_factory=dict)
    decode: Mapping[str, Any] = field(default_factory=dict)
    scored: Mapping[str, Any] | None = None
    num_legs: int = 1
    path: str = COMPLETIONS
    num_choices: int = 1
    text: str = ""


FIELDS = {
    "n": Field({"n": 2, **SAMPLED}, {"n": ABSENT}, {"n": ABSENT}, num_legs=2, num_choices=2),
    "best_of": Field({"best_of": 3, **SAMPLED}, {"best_of": ABSENT}, {"best_of": ABSENT, "logprobs": 0}, num_legs=3),
    "echo": Field({"echo": True}, {"echo": ABSENT, "prompt_logprobs": ABSENT}, {"echo": ABSENT}, text=TEXT),
    "echo with log probabilities": Field(
        {"echo": True, "logprobs": 2}, {"prompt_logprobs": ABSENT}, {"echo": ABSENT, "logprobs": 2},
        {"echo": ABSENT, "prompt_logprobs": 2, "kv_transfer_params": ABSENT}, text=TEXT,
    ),
    "logprobs": Field({"logprobs": 2}, {"logprobs": 2}, {"logprobs": 2}),
    "prompt_logprobs": Field(
        {"prompt_logprobs": 1}, {"prompt_logprobs": ABSENT}, {"prompt_logprobs": ABSENT},
        {"prompt_logprobs": 1, "kv_transfer_params": ABSENT},
    ),
    "a grammar": Field(
        {"structured_outputs": {"choice": ["fox", "dog"]}}, {"structured_outputs": {"choice": ["fox", "dog"]}},
        {"structured_outputs": {"choice": ["fox", "dog"]}},
    ),
    "a stop string": Field({"stop": ["zebra"]}, {"stop": ABSENT}, {"stop": ABSENT}),
    "stop_token_ids": Field({"stop_token_ids": [7]}, {"stop_token_ids": []}, {"ignore_eos": True}),
    "min_tokens": Field({"min_tokens": 3}, {"min_tokens": 1, "max_tokens": 1}, {"min_tokens": 3, "max_tokens": 8}),
    "sampling": Field(
        SAMPLED | {"top_p": 0.5, "top_k": 9, "presence_penalty": 1.0},
        SAMPLED | {"top_p": 0.5, "top_k": 9, "presence_penalty": 1.0},
        SAMPLED | {"top_p": 0.5, "top_k": 9, "presence_penalty": 1.0},
    ),
    "cache_salt": Field({"cache_salt": "s"}, {"cache_salt": PRESENT}, {"cache_salt": PRESENT}),
    "user": Field({"user": "u", "request_id": "mine"}, {"user": ABSENT, "request_id": ABSENT}, {"user": ABSENT}),
    "tools that may not be called": Field(
        {"tools": [TOOL], "tool_choice": "none"}, {"tools": ABSENT}, {"tools": ABSENT}, path=CHAT
    ),
    "a tool that must be called": Field(
        {"tools": [TOOL], "tool_choice": "required"}, {"tools": ABSENT, "structured_outputs": PRESENT},
        {"tools": ABSENT, "tool_choice": ABSENT, "structured_outputs": PRESENT}, path=CHAT,
    ),
    "an image": Field(
        PICTURED, PICTURED | {"prompt": ABSENT, "max_tokens": 1, "min_tokens": 1, "add_generation_prompt": True},
        PICTURED | {"prompt": ABSENT, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}, path=CHAT,
    ),
    "an image, several sequences": Field(
        PICTURED | {"n": 2, **SAMPLED}, PICTURED | {"n": ABSENT}, PICTURED | {"n": ABSENT}, num_legs=2, num_choices=2,
        path=CHAT,
    ),
    "an image, log probabilities": Field(
        PICTURED | {"logprobs": True, "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 3},
        {"logprobs": True, "top_logprobs": 3}, path=CHAT,
    ),
    "an image, prompt_logprobs": Field(
        PICTURED | {"prompt_logprobs": 1}, {"prompt_logprobs": ABSENT}, {"prompt_logprobs": ABSENT},
        {"prompt_logprobs": 1, "return_token_ids": True, "kv_transfer_params": ABSENT}, path=CHAT,
    ),
    "an image, tools": Field(
        PICTURED | {"tools": [TOOL], "tool_choice": "required"},
        {"tools": PRESENT, "tool_choice": "none", "structured_outputs": PRESENT},
        {"tools": PRESENT, "tool_choice": "none", "structured_outputs": PRESENT}, path=CHAT,
    ),
    "an image, a template's variables": Field(
        PICTURED | {"chat_template_kwargs": {"a": 1}, "cache_salt": "s"},
        {"chat_template_kwargs": {"a": 1}, "cache_salt": PRESENT},
        {"chat_template_kwargs": {"a": 1}, "cache_salt": PRESENT}, path=CHAT,
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", FIELDS.values(), ids=FIELDS)
@pytest.mark.anyio
async def test_each_field_reaches_the_legs_that_need_it(row: Field, model_folder: Path) -> None:
    prompt = {"messages": [{"role": "user", "content": TEXT}]} if row.path == CHAT else {"prompt": TEXT}
    async with served(model_folder) as (client, cluster):
        body = {"model": str(model_folder), "max_tokens": 8, "temperature": 0, **prompt, **row.body}
        response = await client.post(row.path, json=body)

        assert response.status_code == 200, response.text
        answer, legs = response.json(), [worker.received for worker in cluster.workers]
        assert len(answer["choices"]) == row.num_choices
        assert answer["choices"][0].get("text", "").startswith(row.text)
        if "messages" not in row.body:
            assert answer["usage"]["prompt_tokens"] == len(legs[0][0].body["prompt"])
        if "prompt_logprobs" in row.body:
            scored = answer.get("prompt_logprobs") or answer["choices"][0]["prompt_logprobs"]
            assert len(scored) == answer["usage"]["prompt_tokens"]
        if "top_logprobs" in row.body:
            for one in answer["choices"][0]["logprobs"]["content"]:
                assert [one["logprob"]] == [best["logprob"] for best in one["top_logprobs"]][:1], "greedy"
                assert len(one["top_logprobs"]) == 2
        assert answer["usage"]["completion_tokens"] == 8 * row.num_legs
        if row.scored is not None:
            assert _has(legs[0].pop(0).body, row.scored)
        for found, expected in zip(legs, (row.prefill, row.decode), strict=True):
            assert len({leg_id(one) for one in found}) == len(found) == row.num_legs
            assert [one for one in found if not _has(one.body, expected)] == []
        if row.num_legs > 1:
            assert len({one.body["seed"] for one in legs[1]}) == row.num_legs


def _has(body: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    found = {key: body.get(key, ABSENT) for key in expected}
    return all(found[key] == value or (value == PRESENT and found[key] != ABSENT) for key, value in expected.items())


@pytest.mark.parametrize(
    ("path", "fields", "message", "param"),
    [
        (COMPLETIONS, {"prompt": TEXT, "n": 2}, "n must be 1 when using greedy sampling", "n"),
        (
            COMPLETIONS, {"prompt": TEXT, "use_beam_search": True, "n": 2}, "beam search is not available over workers",
            "use_beam_search",
        ),
        (COMPLETIONS, {"prompt": TEXT, "bad_words": ["fox"]}, "bad_words is not available over workers", "bad_words"),
        (COMPLETIONS, {"prompt": [7] * 512}, "maximum context length", "prompt"),
        (
            COMPLETIONS, {"prompt": TEXT, "kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params",
            "kv_transfer_params",
        ),
        ("/v1/embeddings", {"input": TEXT}, NO_VECTORS, "input"),
        ("/pooling", {"input": TEXT}, NO_VECTORS, "input"),
        ("/v1/score", {"text_1": TEXT, "text_2": TEXT}, NO_VECTORS, "input"),
        ("/v1/rerank", {"query": TEXT, "documents": [TEXT]}, NO_VECTORS, "input"),
        ("/v1/metaserver", {"do_remote_decode": True}, "no such path", None),
        ("/classify", {"input": TEXT}, "/classify needs one that", "model"),
        (
            "/inference/v1/generate", {"token_ids": [5], "kv_transfer_params": {"remote_host": "h"}},
            "kv_transfer_params", "kv_transfer_params",
        ),
        (
            "/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"prompt_logprob_token_ids": [[5]]}},
            "is not available over workers", "prompt_logprob_token_ids",
        ),
    ],
)  # fmt: skip
@pytest.mark.anyio
async def test_what_is_refused_reaches_no_worker(
    path: str, fields: dict[str, Any], message: str, param: str | None, model_folder: Path
) -> None:
    async with served(model_folder) as (client, cluster):
        response = await client.post(path, json={"model": str(model_folder), "temperature": 0, **fields})

        assert response.status_code in (400, 404), response.text
        assert message in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == param
        assert not any(worker.received for worker in cluster.workers)


ASK = [{"role": "user", "content": TEXT}]
OTHER_APIS = {
    "messages": ("/v1/messages", {"messages": ASK, "max_tokens": 8}, lambda body: body["content"][0]["text"]),
    "responses": (
        "/v1/responses", {"input": TEXT, "max_output_tokens": 8}, lambda body: body["output"][0]["content"][0]["text"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("path", "body", "text_of"), OTHER_APIS.values(), ids=OTHER_APIS)
@pytest.mark.anyio
async def test_other_apis_answer_as_chats_do(
    path: str, body: dict[str, Any], text_of: Callable[[Any], str], model_folder: Path
) -> None:
    fields = {"model": str(model_folder), "temperature": 0}
    async with served(model_folder) as (client, cluster):
        chat = await client.post(CHAT, json=fields | {"messages": ASK, "max_tokens": 8})
        other = await client.post(path, json=fields | body)
        streamed = await client.post(path, json=fields | body | {"stream": True})

        assert (chat.status_code, other.status_code, streamed.status_code) == (200, 200, 200), other.text
        events = [json.loads(line.removeprefix("data: ")) for line in streamed.text.splitlines() if line[:5] == "data:"]
        text = chat.json()["choices"][0]["message"]["content"]
        assert text_of(other.json()) == text
        assert "".join(_delta(event) for event in events) == text
        assert [[len(one.body["prompt"]) for one in worker.received] for worker in cluster.workers] == (
            [[chat.json()["usage"]["prompt_tokens"]] * 3] * 2
        )


@pytest.mark.anyio
async def test_token_ids_are_continued_as_by_a_completion(model_folder: Path) -> None:
    ids, sampling = [5, 9, 17], {"max_tokens": 8, "temperature": 0}
    async with served(model_folder) as (client, cluster):
        completion = {"prompt": ids, "return_token_ids": True} | sampling
        found = await client.post(COMPLETIONS, json=completion)
        tokens = await client.post("/inference/v1/generate", json={"token_ids": ids, "sampling_params": sampling})

        assert tokens.status_code == 200, tokens.text
        assert tokens.json()["choices"][0]["token_ids"] == found.json()["choices"][0]["token_ids"]
        assert [len(worker.received) for worker in cluster.workers] == [2, 2]


def _delta(event: Mapping[str, Any]) -> str:
    """Return the text that an event adds: Anthropic's, or that of the Responses API."""
    delta = event.get("delta")
    return delta if isinstance(delta, str) else (delta or {}).get("text", "")
