"""The routes of stored responses: retrieve, delete, cancel, and list their input items."""

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from scheduler.api.errors import HttpError, json_response
from scheduler.api.responses.event_stream import EventStream, stored_events
from scheduler.api.responses.stored_items import MAX_PAGE, page_of
from scheduler.app_context import AppContext
from scheduler.responses_store.response_store import ResponseStore, StoredResponse
from wire.errors import InvalidRequest

_TRUE, _FALSE = ("true", "1"), ("false", "0")
RETRIEVE_QUERY: dict[str, dict[str, Any]] = {
    "stream": {"type": "boolean", "default": False},
    "starting_after": {"type": "integer", "minimum": -1, "description": "needs stream"},
}
LIST_QUERY: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": 20},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string"},
}


async def retrieve_response(context: AppContext, request: Request) -> ASGIApp:
    """Return a response, or with `stream` the events of one that was created with `background` and `stream`."""
    streams = _flag(request, "stream")
    after = _number(request, "starting_after", -1, 2**63)
    if after is not None and not streams:
        raise InvalidRequest("starting_after needs stream=true", "starting_after")
    stored = await _find(context, request)
    if not streams:
        return _json(await _current(context, stored))
    first = 0 if after is None else after + 1
    run = context.background.find(stored.response_id)
    if run is not None and run.events is not None:
        return EventStream(run.follow(first), context.config.options.sse_keep_alive_interval)
    if not stored.done:  # it may have ended since
        stored = await _find(context, request)
    if not stored.events:
        raise InvalidRequest(
            "only the events of a response that was created with background and stream are stored: leave out stream",
            "stream",
        )
    return EventStream(stored_events(stored.events, first), None)


async def delete_response(context: AppContext, request: Request) -> Response:
    """Delete a response; one that runs in the background is cancelled first."""
    stored = await _find(context, request)
    if stored.background and not stored.done:
        await context.background.cancel(stored.response_id)
    await _store(context, stored.response_id).delete(stored.response_id, stored.owner)
    return json_response({"id": stored.response_id, "object": "response", "deleted": True})


async def cancel_response(context: AppContext, request: Request) -> Response:
    """Cancel a response that runs in the background; one that is done is returned as it is."""
    stored = await _find(context, request)
    if not stored.background:
        raise InvalidRequest("Cannot cancel a synchronous response: it was created without background", "response_id")
    if not stored.done:
        await context.background.cancel(stored.response_id)
        stored = await _find(context, request)
    return _json(await _current(context, stored))


async def list_input_items(context: AppContext, request: Request) -> Response:
    """Return a page of the items that a response answers, including those of the responses that it continues."""
    limit = _number(request, "limit", 1, MAX_PAGE)
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order is {order!r:.80}, but must be asc or desc", "order")
    stored = await _find(context, request)
    after = request.query_params.get("after")
    return json_response(page_of(orjson.loads(stored.items), limit=limit or 20, order=order, after=after))


async def find_response(
    context: AppContext, response_id: str, owner: str, param: str = "response_id"
) -> StoredResponse:  # fmt: skip
    """Return the response of this owner. Raises HttpError (404) that says whether another store has it."""
    store = _store(context, response_id, param)
    stored = await store.find(response_id, owner)
    if stored is not None:
        return stored
    why = "it was deleted, has expired, or never existed"
    if store.is_foreign(response_id):
        why = "another scheduler stores it, or its store is gone"
    raise _not_found(response_id, why, param)


def owner_of(request: Request) -> str:
    """Return whose responses the request concerns: the tenant of its API key, empty without keys."""
    return str(request.scope["state"].get("tenant", ""))


def _store(context: AppContext, response_id: str, param: str = "response_id") -> ResponseStore:
    if context.responses is None:
        raise _not_found(response_id, "this server stores no responses (--responses-store)", param)
    return context.responses


def _not_found(response_id: str, why: str, param: str) -> HttpError:
    return HttpError(404, f"Response with id {response_id!r:.80} not found: {why}", param)


async def _find(context: AppContext, request: Request) -> StoredResponse:
    return await find_response(context, request.path_params["response_id"], owner_of(request))


async def _current(context: AppContext, stored: StoredResponse) -> bytes | dict[str, Any]:
    """Return the response as it is now."""
    if stored.background and not stored.done:
        run = context.background.find(stored.response_id)
        if run is not None:
            return dict(run.shown())
        stored = await find_response(context, stored.response_id, stored.owner)  # it has ended since
    return stored.response


def _json(body: bytes | dict[str, Any]) -> Response:
    return Response(body, media_type="application/json") if isinstance(body, bytes) else json_response(body)


def _flag(request: Request, name: str) -> bool:
    given = request.query_params.get(name, "false").lower()
    if given not in (*_TRUE, *_FALSE):
        raise InvalidRequest(f"{name} is {given!r:.80}, but must be true or false", name)
    return given in _TRUE


def _number(request: Request, name: str, minimum: int, maximum: int) -> int | None:
    given = request.query_params.get(name)
    if given is None:
        return None
    try:
        number = int(given[:20])
    except ValueError:
        number = minimum - 1
    if not minimum <= number <= maximum:
        raise InvalidRequest(f"{name} is {given!r:.80}, but must be a number from {minimum} to {maximum}", name)
    return number
