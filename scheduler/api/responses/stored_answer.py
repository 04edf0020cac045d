"""Generate a response and store it: in the background, or for a client, which gets the end once it is stored."""

import asyncio

import orjson
from starlette.types import Message, Receive, Scope, Send

from scheduler.api.answer_writer import AnswerWriter, Headers
from scheduler.api.errors import error_body, json_response
from scheduler.api.generation import Generation
from scheduler.api.images import HELD, release_images
from scheduler.api.responses.response_shape import ResponseShape
from scheduler.responses_store.background_runs import BackgroundRun
from scheduler.responses_store.response_store import ResponseStore, StoredResponse
from telemetry.logs import EventLogger
from wire.errors import Draining, InvalidRequest, PdserveError

_log = EventLogger("responses")
_STATE = ("request_id", "shown_id", "api_format", "arrived_s", "refusals", "structured_by", "image_paths")


class StoredAnswer:
    """An ASGI response. If the finished response cannot be stored, the client gets it with `store: false`."""

    def __init__(
        self, generation: Generation, shape: ResponseShape, store: ResponseStore, stored: StoredResponse
    ) -> None:
        self._generation, self._shape = generation, shape
        self._store, self._stored = store, stored
        self._ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises a PdserveError only before anything was sent: then nothing is stored."""
        await self._store.add(self._stored)
        state, start = scope["state"], list[Message]()
        state["answer"] = _StoredStream(state["answer"], self)

        async def send_stored(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.append(message)
            elif await self.finish():
                await send(start[0])
                await send(message)
            else:
                await json_response({**self._shape.final, "store": False})(scope, receive, send)

        try:
            await self._generation(scope, receive, send_stored)
        except Exception:
            if not self._ended:
                await self._end(None)
            raise
        finally:
            if not self._ended:  # the client disconnected, or the server is stopping
                self._shape.cancel()
                await self.finish()

    async def finish(self) -> bool:
        """Store the response at its end; return whether that succeeded."""
        return await self._end(orjson.dumps(self._shape.final))

    async def _end(self, response: bytes | None) -> bool:
        self._ended = True
        return await _finish(self._store, self._stored.response_id, response)


class _StoredStream:
    """The writer of a stream, which stores the response before its last event."""

    def __init__(self, answer: AnswerWriter, stored: StoredAnswer) -> None:
        self.start, self.write = answer.start, answer.write
        self._end, self._stored = answer.end, stored

    async def end(self, content: bytes) -> None:
        """Write the last part of the stream."""
        await self._end(content if await self._stored.finish() else _not_stored(content))


class _BackgroundStream:
    """The writer of a response without a client; `last` are the events that clients get once the response is stored.

    Kept events are limited like whole answers.
    """

    def __init__(self, run: BackgroundRun, max_bytes: int) -> None:
        self.last = b""
        self._run, self._left = run, max_bytes

    def start(self, status: int, headers: Headers) -> None:
        """Do nothing."""

    def write(self, content: bytes) -> None:
        """Add events. Raises InvalidRequest if there are too many."""
        self._run.write(content)
        if self._run.events is not None:
            self._left -= len(content)
            if self._left < 0:
                raise InvalidRequest("the events need more bytes than --max-answer-bytes allows: leave out stream")

    async def end(self, content: bytes) -> None:
        """Keep the last events."""
        self.last = content


def own_scope(scope: Scope) -> Scope:
    """Return what a background response needs of the request's scope, whose state is lost when the request ends."""
    state = {name: scope["state"][name] for name in _STATE if name in scope["state"]}
    if HELD in scope["state"]:
        state[HELD] = scope["state"].pop(HELD)
    return {"type": "http", "headers": scope["headers"], "state": state}


async def generate(
    generation: Generation, shape: ResponseShape, store: ResponseStore, run: BackgroundRun, scope: Scope
) -> None:
    """Generate a response in the background and store it at its end, even if this call is cancelled."""
    context = generation.context
    stream = scope["state"]["answer"] = _BackgroundStream(run, context.config.options.max_answer_bytes)
    try:
        await generation(scope, _no_message, _no_send)
    except asyncio.CancelledError:
        if not context.drain.draining:
            shape.cancel()
        elif not shape.final:
            stream.last = shape.stream_format.frame(error_body(Draining("the server is shutting down"), scope))
    except Exception as error:  # noqa: BLE001 - the outermost frame of a response
        stream.last = shape.stream_format.frame(error_body(error, scope))
    release_images(scope)
    events = b"" if run.events is None else b"".join(run.events) + stream.last
    is_stored = await _finish(store, shape.final["id"], orjson.dumps(shape.final), events)
    if stream.last:
        run.write(stream.last if is_stored else _not_stored(stream.last))


async def _finish(store: ResponseStore, response_id: str, response: bytes | None, events: bytes = b"") -> bool:
    try:
        return await store.finish(response_id, response, events)
    except PdserveError as error:
        _log.warning("response_not_stored", response_id=response_id, error=str(error))
        return False


async def _no_message() -> Message:
    """Wait forever: there is no client that could disconnect."""
    await asyncio.Event().wait()
    raise AssertionError


async def _no_send(_: Message) -> None:
    raise AssertionError("a stream is written elsewhere")


def _not_stored(content: bytes) -> bytes:
    """Return the last events with `store: false` in the last one."""
    before, mark, data = content.rpartition(b"\ndata: ")
    event = orjson.loads(data)
    event["response"]["store"] = False
    return before + mark + orjson.dumps(event) + b"\n\n"
