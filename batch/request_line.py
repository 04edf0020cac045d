"""The HTTP request of one line, or the reason why it is refused, which becomes that line's error."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from batch.lines import json_name

ENDPOINTS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v2/embed",
    "/v1/score", "/score", "/rerank", "/v1/rerank", "/v2/rerank", "/classify", "/pooling",
)  # fmt: skip
"""The paths that a line may have as its `url`."""

_SHOWN_CHARS = 128


class LineRefused(Exception):
    """A line that is not sent; `param` is the field at fault."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class LineRequest:
    """An HTTP request: POST `body` to `path`."""

    path: str
    body: bytes


def request_of(line: Mapping[str, Any]) -> LineRequest:
    """Return the request of a line's object. Raises LineRefused; the server checks the content of the body."""
    url, method, body = line.get("url"), line.get("method"), line.get("body")
    if url not in ENDPOINTS:
        supported = ", ".join(ENDPOINTS)
        raise LineRefused(f"URL {_quote(url)} is not a supported endpoint. Supported endpoints: {supported}", "url")
    if method != "POST":
        raise LineRefused(f"method {_quote(method)} is not supported: the method must be POST", "method")
    if not isinstance(body, dict):
        what = f"is a JSON {json_name(body)}, not an object" if "body" in line else "is missing"
        raise LineRefused(f"the line's body {what}", "body")
    if body.get("stream") not in (None, False):
        raise LineRefused("Request must not be sent in stream mode", "stream")
    if body.get("background") not in (None, False):  # its answer would be a response that has not begun
        raise LineRefused("Request must not run in the background", "background")
    if body.get("encoding_format") in ("bytes", "bytes_only"):
        raise LineRefused("encoding_format must be float or base64: a line's answer is JSON", "encoding_format")
    try:
        return LineRequest(url, orjson.dumps(body))
    except orjson.JSONEncodeError:  # only the depth can be at fault: the body was parsed from JSON
        raise LineRefused("the line's body is nested deeper than 250 levels", "body") from None


def _quote(value: Any) -> str:
    if value is None:
        return "(none)"
    text = value if isinstance(value, str) else f"(a JSON {json_name(value)})"
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
