"""Each field of a body and what the engine receives for it, on completions and chats."""

import json
from pathlib import Path
from typing import Any

import pytest

from scheduler.model.generation_defaults import GUIDE_DEFAULTS
from wire.types import BeamSearch, RepetitionDetection, StructuredOutput

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_renderer")]

SURFACES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "San Francisco is a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}

FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "n": 1, "best_of": None}),
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"temperature": 0.001}, {"temperature": 0.01}),
    ({"top_k": 0}, {"top_k": -1}),
    ({"top_k": 5, "top_p": 0.5, "min_p": 0.1}, {"top_k": 5, "top_p": 0.5, "min_p": 0.1}),
    ({"seed": -1}, {"seed": 2**63 - 1}),
    ({"seed": 7}, {"seed": 7}),
    ({"n": 2, "best_of": 4}, {"n": 2, "best_of": 4}),
    ({"max_tokens": 3, "max_completion_tokens": 5}, {"max_tokens": 5}),
    ({"max_tokens": 9, "min_tokens": 2}, {"max_tokens": 9, "min_tokens": 2}),
    ({"presence_penalty": -2, "frequency_penalty": 2}, {"presence_penalty": -2.0, "frequency_penalty": 2.0}),
    ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
    ({"logit_bias": {"5": 200, "7": -1.5}}, {"logit_bias": ((5, 100.0), (7, -1.5))}),
    ({"allowed_token_ids": [5, 6, 5]}, {"allowed_token_ids": (5, 6)}),
    ({"prompt_logprobs": 3}, {"prompt_logprobs": 3}),
    (
        {"use_beam_search": True, "best_of": 2, "top_k": -1, "temperature": 0},
        {"beam_search": BeamSearch(1.0, False), "n": 1, "best_of": 2, "temperature": 0.0},
    ),
    (
        {"use_beam_search": True, "n": 3, "length_penalty": 2, "early_stopping": "never"},
        {"beam_search": BeamSearch(2.0, "never"), "n": 3, "temperature": 0.0},
    ),
    ({"guided_json": '{"type":"object"}'}, {"structured": StructuredOutput("json", '{"type":"object"}')}),
    ({"guided_json": {"type": "object"}}, {"structured": StructuredOutput("json", '{"type": "object"}')}),
    ({"guided_regex": "a+"}, {"structured": StructuredOutput("regex", "a+")}),
    ({"guided_choice": ["a", "ab"]}, {"structured": StructuredOutput("choice", '["a", "ab"]')}),
    ({"guided_grammar": 'root ::= "a"'}, {"structured": StructuredOutput("grammar", 'root ::= "a"')}),
    ({"guided_json_object": True}, {"structured": StructuredOutput("json_object", "")}),
    (
        {"guided_json": "{}", "guided_decoding_backend": "outlines", "guided_whitespace_pattern": ""},
        {"structured": StructuredOutput("json", "{}", "", "outlines")},
    ),
    (
        {"guided_regex": "a", "guided_decoding_backend": "xgrammar:no-fallback"},
        {"structured": StructuredOutput("regex", "a", None, "xgrammar")},
    ),
    (
        {"repetition_detection": {"max_pattern_size": 8, "min_count": 3}},
        {"repetition_detection": RepetitionDetection(8, 1, 3)},
    ),
    ({"repetition_detection": {"max_pattern_size": 0}}, {"repetition_detection": None}),
    ({"response_format": {"type": "text"}}, {"structured": None}),
    ({"response_format": {"type": "json_object"}}, {"structured": StructuredOutput("json_object", "")}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}},
        {"structured": StructuredOutput("json", '{"type": "array"}')},
    ),
    (
        {"response_format": {"type": "json_object", "value": {"type": "array"}}},
        {"structured": StructuredOutput("json", '{"type": "array"}')},
    ),
    ({"structured_outputs": {"regex": "b"}}, {"structured": StructuredOutput("regex", "b")}),
    ({"structured_outputs": {"json_object": True}}, {"structured": StructuredOutput("json_object", "")}),
    (
        {"structured_outputs": {"json": {"type": "array"}, "disable_any_whitespace": True}},
        {"structured": StructuredOutput("json", '{"type": "array"}', "")},
    ),
]


@pytest.mark.parametrize("path", SURFACES)
@pytest.mark.parametrize(("fields", "expected"), FIELDS, ids=lambda value: json.dumps(value, default=str)[:60])
async def test_a_field_reaches_the_engine(serve: Any, path: str, fields: Any, expected: Any) -> None:
    async with serve() as served:
        response = await served.client.post(path, json={"model": served.model} | SURFACES[path] | fields)

        assert response.status_code == 200, response.text
        params = served.dispatcher.requests[0].params
        assert {name: getattr(params, name) for name in expected} == expected


@pytest.mark.parametrize("path", SURFACES)
async def test_bad_words_are_banned_with_and_without_a_space(serve: Any, path: str) -> None:
    async with serve() as served:
        body = {"model": served.model, "bad_words": ["world"]} | SURFACES[path]
        await served.client.post(path, json=body)

        assert served.dispatcher.requests[0].params.bad_words == (served.ids("world"), served.ids(" world"))


async def test_every_bad_key_of_logit_bias_is_named_at_once(serve: Any) -> None:
    async with serve() as served:
        body = {"model": served.model, "prompt": "a", "logit_bias": {"x": 1, "-5": 1, "3": 1}}
        response = await served.client.post("/v1/completions", json=body)

        outside = await served.client.post("/v1/completions", json=body | {"logit_bias": {"3": 1, "400": 1}})

        assert response.json()["error"]["message"] == "logit_bias has keys that are not token ids: 'x', '-5'"
        message = outside.json()["error"]["message"]
        assert message == "logit_bias has token ids out of vocabulary: 400; ids are 0..383"


@pytest.mark.parametrize(("side", "kept"), [(None, [4, 5, 6]), ("left", [4, 5, 6]), ("right", [1, 2, 3])])
async def test_truncate_prompt_tokens_keeps_the_last_or_the_first(serve: Any, side: Any, kept: list[int]) -> None:
    async with serve() as served:
        body = {"model": served.model, "prompt": [1, 2, 3, 4, 5, 6], "truncate_prompt_tokens": 3}
        response = await served.client.post("/v1/completions", json=body | ({"truncation_side": side} if side else {}))

        assert served.dispatcher.requests[0].prompts == (tuple(kept),)
        assert response.json()["usage"]["prompt_tokens"] == 3


async def test_a_truncated_prompt_may_be_longer_than_the_model(serve: Any) -> None:
    async with serve() as served:
        body = {"model": served.model, "max_tokens": 12, "truncate_prompt_tokens": -1}
        for prompt in ([5] * 5000, "a b " * 5000):
            response = await served.client.post("/v1/completions", json=body | {"prompt": prompt})

            assert response.status_code == 200, response.text
            assert response.json()["usage"]["prompt_tokens"] == 500


async def test_max_tokens_0_with_echo_generates_nothing(serve: Any) -> None:
    async with serve("hello") as served:
        body = {"model": served.model, "prompt": "San Francisco", "max_tokens": 0, "echo": True, "logprobs": 1}
        answer = (await served.client.post("/v1/completions", json=body)).json()
        alone = await served.client.post("/v1/completions", json=body | {"echo": False})

        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("San Francisco", "length")
        assert answer["usage"]["completion_tokens"] == 0
        assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
        assert alone.status_code == 400
        assert alone.json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("fields", "header", "priority"), [({}, None, 0), ({"priority": -3}, "5", -3), ({}, "5", 5), ({}, "-1", -1)]
)
async def test_the_priority_is_the_bodys_or_else_the_headers(
    serve: Any, fields: dict[str, int], header: str | None, priority: int
) -> None:
    async with serve() as served:
        headers = {} if header is None else {"X-Vllm-Priority": header}
        body = {"model": served.model, "prompt": "a"} | fields
        await served.client.post("/v1/completions", json=body, headers=headers)

        assert served.dispatcher.requests[0].priority == priority


@pytest.mark.parametrize("header", ["high", "1.5", "2147483648", ""])
async def test_an_invalid_priority_is_400(serve: Any, header: str) -> None:
    async with serve() as served:
        body = {"model": served.model, "prompt": "a"}
        response = await served.client.post("/v1/completions", json=body, headers={"X-Vllm-Priority": header})

        assert (response.status_code, response.json()["error"]["param"]) == (400, "priority")


async def test_kv_is_shared_only_within_a_salt(serve: Any) -> None:
    async with serve() as served:
        for fields in ({}, {"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"}):
            await served.client.post("/v1/completions", json={"model": served.model, "prompt": "x"} | fields)

        none, first, again, other = (request.cache_salt for request in served.dispatcher.requests)
        assert (none, first == again, first == other, first == "a") == ("", True, False, False)


@pytest.mark.covers("B.generation.2")
async def test_the_models_defaults_apply_if_configured(serve: Any, model_folder: Path) -> None:
    defaults = {**GUIDE_DEFAULTS, "temperature": 0.3, "top_k": 7, "max_tokens": 4}
    async with serve(defaults=defaults) as served:
        await served.client.post("/v1/completions", json={"model": served.model, "prompt": "x"})
        await served.client.post("/v1/completions", json={"model": served.model, "prompt": "x", "temperature": 0.9})

        own, requested = (request.params for request in served.dispatcher.requests)
        assert (own.temperature, own.top_k, own.max_tokens) == (0.3, 7, 4)
        assert requested.temperature == 0.9


@pytest.mark.parametrize(("allowed", "status"), [(-1, 200), (384, 200), (500, 200), (383, 400)])
async def test_all_logprobs_need_the_operators_permission(serve: Any, allowed: int, status: int) -> None:
    async with serve(max_logprobs=allowed) as served:
        body = {"model": served.model, "prompt": "x", "logprobs": -1, "max_tokens": 1}
        response = await served.client.post("/v1/completions", json=body)

        assert response.status_code == status, response.text
        assert [request.params.logprobs for request in served.dispatcher.requests] == [384] * (status == 200)
