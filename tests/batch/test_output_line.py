"""Every line of the output has the same form: an answer with a null error, or an error in both places."""

import json
from typing import Any

import jsonschema
import pytest

from batch.backend import Answer
from batch.output_line import LineOutcome, answered, failed, message_of
from tests.batch.scripted import json_answer

ERROR = {
    "type": "object",
    "required": ["message", "type", "param", "code"],
    "additionalProperties": False,
    "properties": {
        "message": {"type": "string", "minLength": 1},
        "type": {"type": "string"},
        "param": {"type": ["string", "null"]},
        "code": {},
    },
}
SCHEMA = {
    "type": "object",
    "required": ["id", "custom_id", "response", "error"],
    "additionalProperties": False,
    "properties": {
        "id": {"type": "string", "pattern": "^pdserve-[0-9a-f]{32}$"},
        "custom_id": {"type": "string"},
        "response": {
            "type": "object",
            "required": ["status_code", "request_id", "body"],
            "additionalProperties": False,
            "properties": {"status_code": {"type": "integer"}, "request_id": {"type": "string"}, "body": {}},
        },
        "error": {"anyOf": [{"type": "null"}, ERROR]},
    },
}


def _read(outcome: LineOutcome) -> dict[str, Any]:
    assert b"\n" not in outcome.line
    line: dict[str, Any] = json.loads(outcome.line)
    jsonschema.validate(line, SCHEMA)
    assert (line["error"] is not None) == outcome.failed
    if outcome.failed:
        assert line["response"]["body"] == {"error": line["error"]}
    return line


def _read_answered(answer: Answer, path: str = "/v1/completions") -> dict[str, Any]:
    return _read(answered("a", "r1", path, answer))


def test_an_answer_is_in_response_with_a_null_error() -> None:
    body = {"id": "cmpl-1", "choices": [{"text": "é\n"}], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}
    outcome = answered("../../x\n", "r1", "/v1/completions", json_answer(body))

    line = _read(outcome)
    assert (line["custom_id"], line["error"]) == ("../../x\n", None)
    assert line["response"] == {"status_code": 200, "request_id": "r1", "body": body}
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (7, 5)


@pytest.mark.parametrize(
    ("path", "num_input", "cached"),
    [
        ("/v1/responses", 7, {"input_tokens_details": {"cached_tokens": 4}}),
        ("/v1/messages", 3, {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 4}),
    ],
)
def test_usage_may_have_the_names_of_other_apis(path: str, num_input: int, cached: dict[str, Any]) -> None:
    usage = {"input_tokens": num_input, "output_tokens": 5} | cached
    outcome = answered("a", "r1", path, json_answer({"usage": usage}))

    assert (outcome.prompt_tokens, outcome.completion_tokens) == (7, 5)


def test_a_body_in_many_lines_becomes_one() -> None:
    answer = Answer(200, {}, json.dumps({"a": [1, 2.5, 1e-7]}, indent=4).encode())

    assert _read_answered(answer)["response"]["body"] == {"a": [1, 2.5, 1e-7]}


def test_the_billed_units_of_an_embedding_count_as_its_prompt() -> None:
    body = {"embeddings": {"float": [[1.0]]}, "meta": {"billed_units": {"input_tokens": 7, "image_tokens": 0}}}

    outcome = answered("a", "r1", "/v2/embed", json_answer(body))

    assert (outcome.prompt_tokens, outcome.completion_tokens) == (7, 0)


@pytest.mark.parametrize("usage", [None, [], {"prompt_tokens": None}, {"prompt_tokens": "7"}, {"prompt_tokens": -1}])
def test_usage_that_counts_nothing_counts_as_nothing(usage: Any) -> None:
    outcome = answered("a", "r1", "/score", json_answer({"usage": usage}))

    assert (outcome.prompt_tokens, outcome.completion_tokens, outcome.failed) == (0, 0, False)


def test_an_error_of_the_server_is_the_lines_own() -> None:
    error = {"message": "no such model: x", "type": "not_found_error", "param": "model", "code": 404}

    line = _read_answered(json_answer({"error": error}, 404))

    assert (line["error"], line["response"]["status_code"]) == (error, 404)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (json_answer({"object": "error", "message": "flat", "type": "X", "param": None, "code": 400}, 400), "flat"),
        (json_answer({"error": {"message": "short"}}, 400), "short"),
        (json_answer({"error": "a text"}, 400), '{"error": "a text"}'),
        (json_answer({"detail": "why"}, 422), '{"detail": "why"}'),
        (json_answer({"error": {"message": "odd", "type": 1, "param": [], "code": None}}, 400), "odd"),
        (Answer(400, {}, b"[" * 500 + b"]" * 500), "[" * 500 + "]" * 12),
        (json_answer([1], 400), "[1]"),
        (Answer(500, {}, b"<html>\n  broken </html>"), "<html> broken </html>"),
        (Answer(500, {}, b""), "the server answers 500"),
        (Answer(307, {}, b""), "the server answers 307"),
        (Answer(500, {}, b"\xff"), "\ufffd"),
    ],
)
def test_errors_of_other_forms_are_converted_to_ours(answer: Answer, message: str) -> None:
    assert _read_answered(answer)["error"]["message"] == message


def test_an_error_message_cannot_control_a_terminal() -> None:
    assert message_of(json_answer({"error": {"message": "a\x1b[2J\nb" + "x" * 9999}}, 503)) == "a [2J b" + "x" * 505
    assert message_of(Answer(503, {}, b"")) == "the server answers 503"


def test_a_long_text_is_cut() -> None:
    assert len(_read_answered(Answer(500, {}, b"x" * 10**6))["error"]["message"]) == 512


def test_an_answer_that_is_nested_too_deeply_is_an_error() -> None:
    line = _read_answered(Answer(200, {}, b"[" * 500 + b"]" * 500))

    assert line["error"]["message"] == "the answer is nested deeper than 250 levels"


@pytest.mark.parametrize("body", [b"data: {}\n\ndata: [DONE]\n\n", b"", b"\xff", b'{"a": NaN}'])
def test_a_200_that_is_not_json_is_an_error(body: bytes) -> None:
    line = _read_answered(Answer(200, {}, body))

    assert line["response"]["status_code"] == 502
    assert line["error"]["message"] == f"the answer (status 200, {len(body)} bytes) is not JSON"


@pytest.mark.parametrize(
    "answer",
    [
        json_answer({"error": {"message": "the model makes vectors; /score needs one that x", "param": "model"}}, 400),
        json_answer({"error": {"message": "The model does not support it", "type": "NotImplementedError"}}, 501),
        json_answer({"detail": "Not Found"}, 404),
        json_answer({"detail": "Method Not Allowed"}, 405),
        Answer(404, {}, b"not found"),
        Answer(404, {}, b""),
    ],
)
def test_an_endpoint_that_the_model_lacks_is_reported(answer: Answer) -> None:
    line = _read_answered(answer, "/score")

    assert line["error"]["message"].startswith("Model does not support endpoint /score: ")
    assert line["response"]["status_code"] == answer.status


def test_an_unknown_model_is_not_a_missing_endpoint() -> None:
    error = {"message": "no such model", "type": "not_found_error", "param": "model", "code": 404}

    assert _read_answered(json_answer({"error": error}, 404))["error"]["message"] == "no such model"


def test_an_unsent_lines_error_has_the_same_form() -> None:
    line = _read(failed("a", "r1", 400, "words", "url"))

    assert line["error"] == {"message": "words", "type": "invalid_request_error", "param": "url", "code": 400}
    assert line["response"]["status_code"] == 400
