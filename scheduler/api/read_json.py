"""Read a request's JSON body, with limits on bytes, depth, time and number of elements."""

import asyncio
from typing import Any

import orjson
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from scheduler.api.errors import HttpError
from scheduler.api.sse import ClientGone
from scheduler.config import SchedulerOptions
from scheduler.http.exchange import HttpExchange
from scheduler.http.header import header_of
from wire.errors import InvalidRequest

KEEP_HEADER = b"x-pdserve-keep-stream"
IDEMPOTENCY_HEADER = b"idempotency-key"
_FORM = "application/x-www-form-urlencoded"
_MAX_DEPTH = 64
_LARGE_BYTES = 256 * 2**10  # parsing more would block the event loop
_MAX_PARTS = 2**18
_BYTES_A_VALUE = 16  # the limit on values is --max-body-bytes divided by this: more values take seconds to parse
_STRIDE = 2**20
_FEW = 1024
_NO_INTEGER = 2.0**63  # from here on orjson parses integers as floats


async def read_json(request: Request, options: SchedulerOptions, *, accepts_form: bool = False) -> dict[str, Any]:
    """Return the body's object. Raises InvalidRequest, HttpError (408, 413, 415) or ClientGone.

    With `accepts_form`, JSON may be labelled as a form, as `curl -d` does, but not by a web page: a form needs no
    preflight.
    """
    given = header_of(request.scope, b"content-type")
    kind = "application/json" if given is None else given.partition(";")[0].strip().lower()
    if not (accepts_form and kind == _FORM and header_of(request.scope, b"origin") is None):
        _check_content_type(kind)
    exchange: HttpExchange | None = request.scope["state"].get("exchange")
    if exchange is not None:
        _check_size(exchange.body_bytes or 0, options.max_body_bytes)
    content = None if exchange is None else exchange.whole_body()  # usually it arrived with the headers
    if content is None:
        content = await _read_in_time(request, options)
    _check_size(len(content), options.max_body_bytes)
    if any(header_of(request.scope, name) is not None for name in (KEEP_HEADER, IDEMPOTENCY_HEADER)):
        request.scope["state"]["body"] = content  # kept with the request's stream (streams.py)
    if len(content) <= _LARGE_BYTES:
        return _parse(content)
    await asyncio.to_thread(_check_parts, content, options.max_body_bytes // _BYTES_A_VALUE)
    return await asyncio.to_thread(_parse, content)


def _check_parts(content: bytes, max_values: int) -> None:
    """Refuse a body that takes seconds to parse. A thread does not help: orjson holds the GIL while it parses."""
    for marks, limit, what in (
        ((b"[", b"{", b":"), _MAX_PARTS, "objects, arrays and members of objects"),
        ((b",",), max_values, "values"),
    ):
        if _count(content, marks) > limit and _has_more_outside_texts(content, marks, limit):
            raise InvalidRequest(f"the body has too many {what}: the limit is {limit}")


def _has_more_outside_texts(content: bytes, marks: tuple[bytes, ...], limit: int) -> bool:
    plain = content.replace(rb"\\", b"").replace(rb"\"", b"")
    number = inside = 0
    for at in range(0, len(plain), _STRIDE):  # in slices, so that other threads can run in between
        pieces = plain[at : at + _STRIDE].split(b'"')
        number += _count(b"".join(pieces[inside::2]), marks)
        if number > limit:
            return True
        inside ^= (len(pieces) - 1) % 2
    return False


def _count(text: bytes, marks: tuple[bytes, ...]) -> int:
    return sum(_count_one(text, mark) for mark in marks)


def _count_one(text: bytes, mark: bytes) -> int:
    """Return how often a byte occurs: `find` is 20 times as fast as `count` if the byte is rare, as in images."""
    number, at = 0, text.find(mark)
    while at >= 0 and number < _FEW:
        number, at = number + 1, text.find(mark, at + 1)
    return number if at < 0 else text.count(mark)


def _parse(content: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body is a JSON {_json_name(body)}, not an object")
    _check_depth(body)
    huge = [name for name, value in body.items() if isinstance(value, float) and abs(value) >= _NO_INTEGER]
    if huge:
        exact = from_json(content)  # integers of any size, so that an error shows the number as sent
        body |= {name: exact[name] for name in huge}
    return body


def _check_content_type(kind: str) -> None:
    if kind != "application/json" and not kind.endswith("+json"):
        raise HttpError(415, f"send application/json: the content-type is {kind[:100]!r}")


async def _read_in_time(request: Request, options: SchedulerOptions) -> bytes:
    try:
        async with asyncio.timeout(options.client_timeout):
            return await _read(request, options.max_body_bytes)
    except TimeoutError:
        raise HttpError(408, f"the body took longer than {options.client_timeout:g} s to arrive") from None
    except ClientDisconnect:
        raise ClientGone("the client disconnected") from None


async def _read(request: Request, limit: int) -> bytes:
    content = bytearray()
    async for part in request.stream():
        content += part
        _check_size(len(content), limit)
    return bytes(content)


def _check_size(num_bytes: int, limit: int) -> None:
    if num_bytes > limit:
        raise HttpError(413, f"the body is larger than {limit} bytes (--max-body-bytes)")


def _check_depth(body: dict[str, Any]) -> None:
    level: list[Any] = [body]
    for _ in range(_MAX_DEPTH):
        level = [item for value in level for item in _nested_values(value)]
        if not level:
            return
    raise InvalidRequest(f"the body is nested deeper than {_MAX_DEPTH} levels")


def _nested_values(value: dict[str, Any] | list[Any]) -> list[Any]:
    items = value.values() if isinstance(value, dict) else value
    return [item for item in items if isinstance(item, (dict, list))]


def _json_name(value: Any) -> str:
    return {list: "array", str: "string", bool: "boolean", type(None): "null"}.get(type(value), "number")
