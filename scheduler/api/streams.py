"""Streams that outlive a connection: a header of the request keeps one, and GET /v1/streams/{stream_id} continues it.

POST, X-Pdserve-Keep-Stream: true --> X-Pdserve-Stream: ID, events 1, 2, ... --the connection or the scheduler dies-->
GET /v1/streams/ID?after=2, at any scheduler --> events 3, 4, ...

The instance that decodes the stream keeps its tokens and the request (wire/kept_stream.py). The scheduler that
continues it prepares the same request again, and runs it from the first token that was generated.
"""

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Scope

from scheduler.adoption import Adoption
from scheduler.api.anthropic.create_message import create_message
from scheduler.api.chat import create_chat_completion
from scheduler.api.completions import create_completion
from scheduler.api.errors import json_response
from scheduler.api.generation import Generation
from scheduler.api.read_json import KEEP_HEADER
from scheduler.api.resumed import Resumed
from scheduler.api.route_entry import Endpoint
from scheduler.app_context import AppContext
from scheduler.dispatch import Dispatch
from scheduler.http.header import header_of
from scheduler.request_class import CLASS_HEADER
from wire.check_prompt import MAX_STREAM_REQUEST
from wire.errors import InvalidRequest, UnknownStream
from wire.types import ResumableStream

KEPT: Mapping[str, Endpoint] = {
    "/v1/completions": create_completion,
    "/v1/chat/completions": create_chat_completion,
    "/v1/messages": create_message,
}
"""The routes whose streams can be kept."""
RESUME_QUERY: dict[str, dict[str, Any]] = {
    "after": {"type": "integer", "minimum": 0, "default": 0, "description": "how many events the client has"},
}
_NAME, _IF_POSSIBLE = "X-Pdserve-Keep-Stream", "if-possible"
_STREAM_ID = re.compile("[0-9a-f]{32}")
_HEADERS = (b"content-type", CLASS_HEADER, b"x-vllm-priority")
_STATE = ("request_id", "shown_id", "api_format", "arrived_s", "refusals", "tenant")
_MAX_AFTER = 2**53


def keeps_stream(request: Request) -> bool:
    """Return whether the client wants its stream to be kept. Raises InvalidRequest."""
    wanted = header_of(request.scope, KEEP_HEADER)
    if wanted is None or wanted.lower() in ("false", "0"):
        return False
    if wanted.lower() in ("true", "1", _IF_POSSIBLE):
        return True
    raise InvalidRequest(f"the header {_NAME} is {wanted!r:.40}, but must be true, false or {_IF_POSSIBLE}")


async def create_kept(context: AppContext, endpoint: Endpoint, request: Request) -> Generation:
    """Return the response of an endpoint of KEPT, whose stream is kept.

    If it cannot be kept, raises InvalidRequest, or with the header's value `if-possible` returns the response anyway.
    """
    generation, why = await prepare_kept(context, endpoint, request, secrets.token_hex(16))
    del request.scope["state"]["body"]
    check_kept(request, why)
    return generation


def check_kept(request: Request, why_not: str | None) -> None:
    """Raise InvalidRequest if the client insists on keeping a stream that is not kept."""
    if why_not and keeps_stream(request) and header_of(request.scope, KEEP_HEADER) != _IF_POSSIBLE:
        raise InvalidRequest(f"{_NAME}: {why_not}")


async def prepare_kept(
    context: AppContext, endpoint: Endpoint, request: Request, stream_id: str, *, may_be_whole: bool = False
) -> tuple[Generation, str | None]:
    """Return the response of an endpoint of KEPT, kept as this stream if it can be, and why if it cannot.

    `may_be_whole`: keep the tokens of an answer that is not streamed too.
    """
    state = request.scope["state"]
    state["created"] = int(time.time())
    generation = await endpoint(context, request)
    assert isinstance(generation, Generation)
    head = {
        "path": request.scope["path"],
        "created": state["created"],
        "id": state.get("client_id") or generation.request.request_id.rpartition("-")[2],
        "headers": {name.decode(): header_of(request.scope, name) for name in _HEADERS},
    }
    record = orjson.dumps(head) + b"\n" + state["body"]
    why = _why_not(generation, record, may_be_whole=may_be_whole) or _why_none(context)
    if why:
        return generation, why
    stream = ResumableStream(stream_id, str(state.get("tenant", "")), record)
    if generation.options.stream:
        state["stream_id"] = stream_id
    return replace(generation, request=replace(generation.request, stream=stream)), None


async def resume_stream(context: AppContext, request: Request) -> ASGIApp:
    """Return the rest of a stream. Raises UnknownStream, or Unavailable if an instance that may have it is silent."""
    after, state = _after(request), request.scope["state"]
    streams, adoption = await _adopt(context, request)
    return await continue_stream(context, state, streams, adoption, after)


async def continue_stream(
    context: AppContext, state: dict[str, Any], streams: Dispatch, adoption: Adoption, after: int = 0
) -> Generation:
    """Return the response that runs an adopted stream, for a client that has its first `after` events."""
    generation = await _generation_of(context, state, adoption)
    if generation.options.stream:
        state["stream_id"] = adoption.stream.stream_id
    run = partial(streams.resume, adoption)
    return replace(generation, resumed=Resumed(run, after, adoption.num_counted))


async def end_stream(context: AppContext, request: Request) -> Response:
    """End a stream whose client does not want the rest. Raises as `resume_stream` does."""
    _, adoption = await _adopt(context, request)
    adoption.release()
    return json_response({"id": adoption.stream.stream_id, "object": "stream", "deleted": True})


async def _adopt(context: AppContext, request: Request) -> tuple[Dispatch, Adoption]:
    stream_id, streams = request.path_params["stream_id"], context.streams
    if streams is None or not _STREAM_ID.fullmatch(stream_id):
        raise UnknownStream(f"no stream has the id {stream_id!r:.80} here")
    return streams, await streams.adopt(stream_id, str(request.scope["state"].get("tenant", "")))


async def _generation_of(context: AppContext, state: Mapping[str, Any], adoption: Adoption) -> Generation:
    """Prepare the request of a stream again; its token ids and random seed are those that the instance has."""
    head_bytes, _, body = adoption.stream.request.partition(b"\n")
    head, prompt = orjson.loads(head_bytes), adoption.prompt
    headers = [(name.encode(), value.encode()) for name, value in head["headers"].items() if value is not None]
    headers.append((b"x-request-id", head["id"].encode()))
    own = {name: state[name] for name in _STATE} | {"ids_in_use": set(), "created": head["created"]}
    own["request_class"] = context.class_of(own["tenant"], head["headers"].get(CLASS_HEADER.decode()))
    scope: Scope = {
        "type": "http", "method": "POST", "path": head["path"], "query_string": b"", "headers": headers, "state": own,
    }  # fmt: skip

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    generation = await KEPT[head["path"]](context, Request(scope, receive))
    assert isinstance(generation, Generation)
    request = replace(
        generation.request, request_id=prompt.request_id, prompts=(prompt.token_ids,), params=prompt.params,
        cache_salt=prompt.cache_salt, stream=adoption.stream,
    )  # fmt: skip
    return replace(generation, request=request)


def _why_none(context: AppContext) -> str | None:
    """Return why this server keeps no stream at all, None if it does."""
    if context.streams is None:
        return "this server keeps no streams (--orphan-limit 0)"
    if context.streams.has_workers:
        return "streams of vLLM workers are not kept"
    return None


def _why_not(generation: Generation, record: bytes, *, may_be_whole: bool) -> str | None:
    """Return why the stream of this response cannot be kept, None if it can be."""
    request, options = generation.request, generation.options
    if not options.stream and not may_be_whole:
        return "the request has no stream: true"
    if len(request.prompts) > 1 or request.params.num_sequences > 1 or request.params.beam_search is not None:
        return "only streams with one choice are kept"
    if options.logprobs is not None:
        return "log probabilities are not kept"
    if request.images or request.chat is not None:
        return "streams of prompts with images are not kept"
    if len(record) > MAX_STREAM_REQUEST:
        return f"the body has {len(record)} bytes, but the limit for a kept stream is {MAX_STREAM_REQUEST}"
    return None


def _after(request: Request) -> int:
    given = request.query_params.get("after", "0")
    if not given.isascii() or not given.isdigit() or len(given) > 16 or int(given) > _MAX_AFTER:
        raise InvalidRequest(f"after is {given!r:.40}, but must be a number of events, 0 or more", "after")
    return int(given)
