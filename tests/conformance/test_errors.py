"""Errors and headers as clients see them, and grammars beyond the legacy API's, combined and over P/D."""

import json
from typing import Any

import httpx
import jsonschema
import pytest

from tests.conformance.served import CHAT, PROMPT, Compared, Served

pytestmark = pytest.mark.cluster

ROUTES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/embeddings",
    "/v1/score",
    "/score",
    "/tokenize",
    "/detokenize",
)
LEAKS = ("Traceback", "site-packages", ".py", "0x", "/tmp", "/home", "127.0.0.1")


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """Return the error of an answer with this status."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert not any(leak in error["message"] for leak in LEAKS), error
    return error


@pytest.mark.covers("B.errors.1", "B.errors.2", "B.errors.3", "B.errors.4", "B.errors.6", "B.errors.8")
@pytest.mark.parametrize("path", ROUTES)
def test_every_route_answers_in_one_envelope(served: Served, path: str) -> None:
    http, json_type = served.http, {"content-type": "application/json"}
    for broken in (b"", b"{", b"[]", b"null", b'{"a": NaN}', b"\xff", b'{"a":' * 80 + b"1" + b"}" * 80):
        error_of(http.post(path, content=broken, headers=json_type), 400)
    error_of(http.post(path, content=b"{}", headers={"content-type": "text/plain"}), 415)
    error_of(http.post(path, files={"file": b"x"}), 415)
    error_of(http.get(path), 405)
    error_of(http.post(path + "/x", json={}), 404)
    long = error_of(http.post(path, json={"model": ["x" * 10**5]}), 400)
    assert len(long["message"]) < 1000


@pytest.mark.covers("B.errors.2")
def test_an_errors_path_leads_to_the_wrong_value(served: Served) -> None:
    chats = "/v1/chat/completions"
    cases: list[tuple[str, dict[str, Any], str]] = [
        (chats, {"messages": [CHAT[0], {"role": "user", "content": 5}]}, "messages.1.content"),
        (chats, {"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages.0.content.0"),
        (chats, {"messages": CHAT, "stream": True, "stream_options": {"include_usage": "a"}},
         "stream_options.include_usage"),
        ("/v1/completions", {"prompt": PROMPT, "stop_token_ids": [1, "x"]}, "stop_token_ids.1"),
        ("/v1/completions", {"prompt": PROMPT, "response_format": {"type": "json_schema"}},
         "response_format.json_schema"),
    ]  # fmt: skip
    for path, body, param in cases:
        assert error_of(served.post(path, **body), 400)["param"] == param


@pytest.mark.covers("B.errors.3", "B.errors.4")
def test_another_model_is_404_and_no_folder_is_shown(served: Served) -> None:
    for path, body in (("/v1/completions", {"prompt": PROMPT}), ("/v1/embeddings", {"input": PROMPT})):
        error = error_of(served.http.post(path, json={"model": "gpt-9"} | body), 404)
        assert error["message"].endswith("served: tiny")
        assert (error["param"], error["type"]) == ("model", "not_found_error")
    error_of(served.http.get("/v1/models/gpt-9"), 404)


@pytest.mark.covers("B.errors.12")
def test_a_prompt_too_long_names_the_maximum_context_length(served: Served) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": [5] * 513}),
        ("/v1/completions", {"prompt": [5] * 512, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "fox " * 600}]}),
    ):
        error = error_of(served.post(path, **body), 400)
        assert "maximum context length is 512 tokens" in error["message"]


@pytest.mark.covers("B.headers.1")
def test_a_clients_id_is_the_suffix_of_the_answers_and_is_returned(served: Served) -> None:
    headers = {"X-Request-Id": "order-66"}
    for path, body, kind in (
        ("/v1/completions", {"prompt": PROMPT}, "cmpl"),
        ("/v1/chat/completions", {"messages": CHAT}, "chatcmpl"),
    ):
        answer = served.http.post(path, json={"model": "tiny", "max_tokens": 1} | body, headers=headers)
        assert answer.headers["x-request-id"] == "order-66"
        assert answer.json()["id"] == f"{kind}-order-66"


@pytest.mark.covers("B.structured.2", "B.structured.3", "B.structured.6")
def test_current_formats_are_enforced(compared: Compared) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for fields in (
        {"response_format": named},
        {"structured_outputs": {"json": schema, "disable_any_whitespace": True}},
        {"structured_outputs": {"json": schema, "whitespace_pattern": ""}},
    ):
        text = compared.chat_text(max_tokens=60, **fields)
        jsonschema.validate(json.loads(text), schema)
        compared.agree(str(fields), text)
        assert " " not in text or "response_format" in fields
    tag = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}],
        "triggers": ["<f"],
    }
    content = {"type": "json_schema", "json_schema": schema}
    tags = [{"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}]
    form = {"type": "triggered_tags", "triggers": ["<f"], "tags": tags}
    text = compared.text(response_format=tag)
    assert compared.text(structured_outputs={"structural_tag": json.dumps(tag)}) == text
    assert compared.text(response_format={"type": "structural_tag", "format": form}) == text
    must = {"type": "structural_tag", "format": {**form, "at_least_one": True, "stop_after_first": True}}
    dense = {"structural_tag": json.dumps(must), "disable_any_whitespace": True}
    whole = compared.text(structured_outputs=dense, max_tokens=60)
    jsonschema.validate(json.loads(whole.removeprefix("<f>").removesuffix("</f>")), schema)
    assert compared.chat_text(response_format={"type": "text"}) == compared.chat_text()


@pytest.mark.covers("B.structured.5")
def test_nesting_is_limited(served: Served) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(70):
        schema = {"type": "array", "items": schema}
    assert "64" in served.refused(guided_json=json.dumps(schema))["message"]
    assert "64" in error_of(served.post("/v1/completions", prompt=PROMPT, guided_json=schema), 400)["message"]
