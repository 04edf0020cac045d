"""Errors in Anthropic's format: {"type": "error", "error": {"type", "message"}, "request_id"}."""

from typing import Any

from scheduler.api.api_format import ApiFormat, ShownError

_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    413: "request_too_large", 429: "overloaded_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
_OVERLOADED = 529
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""These details make Anthropic's clients send the request again with all messages and without `thread`."""
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string", "description": "begins with the path of the invalid field"},
            },
        },
        "request_id": {"type": "string"},
    },
}


def _error_body(error: ShownError, request_id: str) -> dict[str, Any]:
    message, path = error.message, error.param
    if path is not None and path not in message:
        message = f"{path}: {message}"
    kind = _TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "api_error")
    details = {"details": _NO_THREADS} if path == "thread" else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}, "request_id": request_id}


ANTHROPIC_FORMAT = ApiFormat(
    _error_body, ("AnthropicError", _SCHEMA), {429: _OVERLOADED, 503: _OVERLOADED}, (b"x-request-id", b"request-id")
)  # fmt: skip
"""What is 429 (a full queue) or 503 (nothing can serve now) elsewhere is 529 here, which Anthropic's clients retry."""
