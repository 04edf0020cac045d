"""What the routes of one API have in common: how errors look, and the headers with the request's id."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ShownError:
    """An error as its client sees it: `kind` is OpenAI's type, `param` the path of the invalid field."""

    message: str
    kind: str
    param: str | None
    status: int


@dataclass(frozen=True, slots=True)
class ApiFormat:
    """`error_body` returns the body of an error, given a request's id; `statuses` replaces OpenAI's HTTP statuses.

    `error_schema` is the body's name and JSON schema in the OpenAPI document.
    """

    error_body: Callable[[ShownError, str], dict[str, Any]]
    error_schema: tuple[str, dict[str, Any]]
    statuses: Mapping[int, int] = field(default_factory=dict)
    id_headers: tuple[bytes, ...] = (b"x-request-id",)

    def status_of(self, error: ShownError) -> int:
        """Return the HTTP status of an error."""
        return self.statuses.get(error.status, error.status)


def _openai_error(error: ShownError, _: str) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.status}}


_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "path of the invalid field"},
                "code": {"type": "integer", "description": "the HTTP status"},
            },
        }
    },
}
OPENAI_FORMAT = ApiFormat(_openai_error, ("Error", _ERROR))
"""{"error": {"message", "type", "param", "code"}}."""
