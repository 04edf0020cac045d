"""One line of the input: its JSON object and its custom_id, or the problem with them."""

from typing import Any

import orjson

_SHOWN_ID = 64  # characters of a custom_id that an error repeats


class BadLine(ValueError):
    """A line that fails the run; the message continues `line N `, and quotes nothing but the custom_id."""


def parse_line(content: bytes) -> dict[str, Any]:
    """Return the object of a line, which has a custom_id. Raises BadLine."""
    try:
        request = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise BadLine(_json_problem(content, error)) from None
    if not isinstance(request, dict):
        raise BadLine(f"is a JSON {json_name(request)}, not an object")
    if "custom_id" not in request:
        raise BadLine("has no custom_id")
    if not isinstance(request["custom_id"], str):
        raise BadLine(f"has a custom_id that is a JSON {json_name(request['custom_id'])}, not a string")
    return request


def shown_id(custom_id: str) -> str:
    """Return a custom_id as shown in errors."""
    return repr(custom_id if len(custom_id) <= _SHOWN_ID else custom_id[:_SHOWN_ID] + "…")


def json_name(value: Any) -> str:
    """Return JSON's name for the type of this value."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _json_problem(content: bytes, error: orjson.JSONDecodeError) -> str:
    if (at := content.find(0)) >= 0:
        return f"has a NUL byte at column {at + 1}"
    try:
        content.decode()
    except UnicodeDecodeError as wrong:
        return f"is not UTF-8: byte 0x{content[wrong.start]:02x} at column {wrong.start + 1}"
    if content.strip() in (b"{", b"["):
        return "is the start of JSON over several lines: each request must be on one line"
    if "depth limit" in error.msg:
        return "is nested too deeply: the limit is 1024 levels"
    return f"is not JSON: {error.msg} at column {error.colno}"
