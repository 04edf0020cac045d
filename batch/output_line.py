"""One line of the output: {id, custom_id, response: {status_code, request_id, body}, error}.

answered   response.body is the answer's body, and error is null
failed     response.body is {"error": E} as over HTTP, and error is the same E: {message, type, param, code}
"""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from batch.backend import Answer

_SHOWN_CHARS = 512
_MISSPELT = re.compile(r"[\w.-]{1,40} is not a known field and has no effect: did you mean [\w.-]{1,40}\?", re.ASCII)
_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 408: "timeout_error",
    429: "rate_limit_error", 502: "service_unavailable_error", 503: "service_unavailable_error", 504: "timeout_error",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LineOutcome:
    """A line of the output, without its end, and its token counts.

    `message` describes a failure, `warnings` misspelt fields of the request, both safe to print.
    """

    line: bytes
    failed: bool
    prompt_tokens: int = 0
    completion_tokens: int = 0
    message: str = field(default="", compare=False)
    warnings: tuple[str, ...] = field(default=(), compare=False)


def new_request_id() -> str:
    """Return a new request id for a line."""
    return f"pdserve-batch-{secrets.token_hex(16)}"


def warnings_of(answer: Answer) -> tuple[str, ...]:
    """Return the warning for each misspelt field from an answer's Warning header."""
    return tuple(_MISSPELT.findall(answer.headers.get("warning", "")))


def answered(custom_id: str, request_id: str, path: str, answer: Answer) -> LineOutcome:
    """Return the outcome of a line for an answer of any status from `path`."""
    is_good = 200 <= answer.status < 300
    try:
        body = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        if is_good:
            message = f"the answer (status {answer.status}, {len(answer.body)} bytes) is not JSON"
            return failed(custom_id, request_id, 502, message)
        body = None
    if not is_good:
        return _failed_line(custom_id, request_id, answer.status, _error_of(path, answer, body))
    try:
        line = _line(custom_id, request_id, answer.status, body, None)
    except orjson.JSONEncodeError:  # only the depth can be at fault: the body was parsed from JSON
        return failed(custom_id, request_id, 502, "the answer is nested deeper than 250 levels")
    return LineOutcome(line, False, *_tokens(body))


def good_outcome(parsed: Mapping[str, Any], line: bytes) -> LineOutcome | None:
    """Return the outcome of an output's `line`, whose object is `parsed`, or None if the line failed."""
    response = parsed.get("response")
    if parsed.get("error") is not None or not isinstance(response, dict):
        return None
    status = response.get("status_code")
    if not isinstance(status, int) or not 200 <= status < 300:
        return None
    return LineOutcome(line, False, *_tokens(response.get("body")))


def failed(custom_id: str, request_id: str, status: int, message: str, param: str | None = None) -> LineOutcome:
    """Return the outcome of a request that was not sent or not answered; `status` is the matching HTTP status."""
    return _failed_line(custom_id, request_id, status, _error(status, message, param))


def message_of(answer: Answer) -> str:
    """Return the message of an error answer, safe for a terminal."""
    try:
        body = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        body = None
    return _printable(_error_of("", answer, body)["message"])


def _error_of(path: str, answer: Answer, body: Any) -> dict[str, Any]:
    """Return the error in a body, in our form; for any other body, its text."""
    status, given = answer.status, body.get("error", body) if isinstance(body, dict) else None
    if isinstance(given, dict) and isinstance(given.get("message"), str):
        error = _error(status, given["message"], None)
        error |= {name: given[name] for name in ("type", "param") if isinstance(given.get(name), str)}
        error |= {"code": given["code"]} if isinstance(given.get("code"), str | int) else {}
        lacking = status == 501 or (error["param"] == "model" and f"{path} needs one that" in given["message"])
    else:
        text = " ".join(answer.body[: 4 * _SHOWN_CHARS].decode(errors="replace").split())[:_SHOWN_CHARS]
        error = _error(status, text or f"the server answers {status}", None)
        lacking = status in (404, 405)  # no such route
    if lacking:
        error["message"] = f"Model does not support endpoint {path}: {error['message']}"
    return error


def _error(status: int, message: str, param: str | None) -> dict[str, Any]:
    kind = _TYPES.get(status, "internal_server_error" if status >= 500 else "invalid_request_error")
    return {"message": message, "type": kind, "param": param, "code": status}


def _failed_line(custom_id: str, request_id: str, status: int, error: dict[str, Any]) -> LineOutcome:
    line = _line(custom_id, request_id, status, {"error": error}, error)
    return LineOutcome(line, True, message=f"{_printable(custom_id)!r}: {_printable(error['message'])}")


def _printable(text: object) -> str:
    return "".join(char if char.isprintable() else " " for char in str(text)[:_SHOWN_CHARS])


def _line(custom_id: str, request_id: str, status: int, body: Any, error: dict[str, Any] | None) -> bytes:
    response = {"status_code": status, "request_id": request_id, "body": body}
    line = {"id": f"pdserve-{secrets.token_hex(16)}", "custom_id": custom_id, "response": response, "error": error}
    return orjson.dumps(line)


def _tokens(body: Any) -> tuple[int, int]:
    """Return the prompt and completion tokens from the usage in an answer's body, with the field names of any API.

    Anthropic counts a prompt's cached tokens separately from the rest.
    """
    found = body if isinstance(body, dict) else {}
    counts = _object(found.get("usage")) or _object(_object(found.get("meta")).get("billed_units"))  # Cohere's
    num_prompt = counts.get("prompt_tokens", counts.get("input_tokens"))
    cached = sum(_count(counts.get(f"cache_{how}_input_tokens")) for how in ("creation", "read"))
    return _count(num_prompt) + cached, _count(counts.get("completion_tokens", counts.get("output_tokens")))


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value >= 0 else 0
