"""The stateful part of creating a response: finding the items before it, and storing it."""

from collections.abc import Sequence

import orjson
from starlette.requests import Request
from starlette.types import ASGIApp

from scheduler.api.errors import json_response
from scheduler.api.generation import Generation
from scheduler.api.responses.event_stream import EventStream
from scheduler.api.responses.input_items import Item
from scheduler.api.responses.response_shape import ResponseShape
from scheduler.api.responses.responses_body import ResponsesBody
from scheduler.api.responses.stored_answer import StoredAnswer, generate, own_scope
from scheduler.api.responses.stored_items import stored_items
from scheduler.api.responses.stored_responses import find_response, owner_of
from scheduler.app_context import AppContext
from scheduler.responses_store.background_runs import BackgroundRun
from scheduler.responses_store.response_store import ResponseStore, StoredResponse
from wire.errors import Draining, InvalidRequest

_PREVIOUS = "previous_response_id"


def store_for(context: AppContext, body: ResponsesBody) -> ResponseStore | None:
    """Return the store of the response, None if it is not stored. Raises InvalidRequest."""
    store = None if body.store is False else context.responses
    if body.background and store is None:
        why = ": this server stores no responses (--responses-store)" if context.responses is None else ""
        raise InvalidRequest(f"background can only be used when `store` is true{why}", "background")
    return store


async def earlier_items(context: AppContext, body: ResponsesBody, request: Request) -> list[Item]:
    """Return the items that the response continues: the items that the previous response answered, and its output.

    Raises HttpError (404) or InvalidRequest.
    """
    if body.previous_response_id is None:
        return []
    previous = await find_response(context, body.previous_response_id, owner_of(request), _PREVIOUS)
    if not previous.done:
        raise InvalidRequest(f"{_PREVIOUS} names a response that has not ended: wait for it", _PREVIOUS)
    return [*orjson.loads(previous.items), *orjson.loads(previous.response)["output"]]


async def store_answer(
    store: ResponseStore, generation: Generation, shape: ResponseShape, items: Sequence[Item], body: ResponsesBody,
    request: Request,
) -> ASGIApp:  # fmt: skip
    """Return the answer to a request whose response is stored; start a response that runs in the background."""
    context, head = generation.context, dict(shape.head)
    if body.background:
        head["status"] = "queued"
    kept_items = orjson.dumps(stored_items(items, head["id"]))
    stored = StoredResponse(head["id"], owner_of(request), bool(body.background), orjson.dumps(head), kept_items)
    if not body.background:
        return StoredAnswer(generation, shape, store, stored)
    if context.drain.draining:
        raise Draining("the server is shutting down")
    await store.add(stored)
    run = BackgroundRun(shape.head, streams=bool(body.stream))
    context.background.start(head["id"], run, generate(generation, shape, store, run, own_scope(request.scope)))
    if body.stream:
        return EventStream(run.follow(0), context.config.options.sse_keep_alive_interval)
    return json_response(run.shown())
