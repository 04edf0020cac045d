"""Requests with an Idempotency-Key: a repeated one joins the run of the first, or gets its answer again.

POST --ClaimRun--> NEW: run it | RUNNING: wait for its answer, or continue its stream | DONE: the same answer
Its stream is kept (streams.py), so that it can be continued when its client or its scheduler is gone.
"""

import asyncio
import secrets
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from scheduler.api.errors import HttpError
from scheduler.api.generation import Generation
from scheduler.api.read_json import IDEMPOTENCY_HEADER
from scheduler.api.route_entry import Endpoint
from scheduler.api.sse import until_disconnect
from scheduler.api.streams import check_kept, continue_stream, prepare_kept
from scheduler.app_context import AppContext
from scheduler.http.header import whole_header
from scheduler.request_claims import RequestClaim
from wire.errors import InvalidRequest, Overloaded, StreamMoved, Unavailable, UnknownStream
from wire.messages import Claimed, ClaimState, RunEnd

_NAME = "Idempotency-Key"
_REPLAYED = "x-pdserve-replayed"
_MAX_LENGTH = 255
_POLL_S = 0.1


def has_idempotency_key(request: Request) -> bool:
    """Return whether the request names a key. Raises InvalidRequest for one that cannot be used."""
    key = whole_header(request.scope, IDEMPOTENCY_HEADER)
    if key is not None and not 0 < len(key) <= _MAX_LENGTH:
        raise InvalidRequest(f"the header {_NAME} has {len(key)} characters, but must have 1 to {_MAX_LENGTH}")
    return key is not None


async def create_once(context: AppContext, endpoint: Endpoint, request: Request) -> "RunOnce":
    """Return the response of an endpoint of streams.KEPT that runs once for each key."""
    key, state = whole_header(request.scope, IDEMPOTENCY_HEADER), request.scope["state"]
    assert key is not None
    assert context.claims is not None
    stream_id = secrets.token_hex(16)
    generation, why_not = await prepare_kept(context, endpoint, request, stream_id, may_be_whole=True)
    check_kept(request, why_not)
    content = request.scope["path"].encode() + b"\n" + state.pop("body")
    claim = context.claims.claim(str(state.get("tenant", "")), key, content, stream_id)
    return RunOnce(context, generation, claim)


@dataclass(frozen=True, slots=True)
class RunOnce:
    """An ASGI response that runs `generation` if no other request with its key does or did."""

    context: AppContext
    generation: Generation
    claim: RequestClaim

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises a PdserveError or HttpError only before anything was sent."""
        begun: list[Generation | Response] = []
        try:
            with self.context.drain:
                await until_disconnect(receive, self._begin(scope, begun))
            run = begun[0]
            if isinstance(run, Generation):
                run = replace(run, claim=self.claim)
            await run(scope, receive, send)
        except StreamMoved:
            self.claim.end(RunEnd.MOVED)
            raise
        finally:
            self.claim.end(RunEnd.FAILED)

    async def _begin(self, scope: Scope, begun: list[Generation | Response]) -> None:
        """Wait for our turn, and pass on what to run or to answer."""
        while not begun:
            claimed = await self.claim.make()
            match claimed.state:
                case ClaimState.NEW:
                    begun.append(self.generation)
                case ClaimState.ORPHANED:
                    begun.append(await self._continue(scope))
                case ClaimState.DONE:
                    begun.append(self._replay(scope, claimed.answer))
                case ClaimState.RUNNING | ClaimState.LEFT:
                    begun += await self._join(scope, claimed)
                case ClaimState.DIFFERENT:
                    raise HttpError(422, f"another request of this API key had the same {_NAME}: send a new key")
                case ClaimState.FULL:
                    raise Overloaded(f"too many requests with an {_NAME} are running for this API key")

    async def _continue(self, scope: Scope) -> Generation:
        """Return the run of a scheduler that is gone, or our own if nothing of it is kept. Raises Unavailable."""
        stream_id, request = self.claim.stream_id, self.generation.request
        try:
            return await self._adopted(scope, stream_id)
        except UnknownStream:
            self.claim.claims.ran_again()
        except Unavailable:
            self.claim.end(RunEnd.MOVED)  # it may still be there
            raise
        if request.stream is None:
            return self.generation
        if self.generation.options.stream:
            scope["state"]["stream_id"] = stream_id
        return replace(self.generation, request=replace(request, stream=replace(request.stream, stream_id=stream_id)))

    async def _join(self, scope: Scope, claimed: Claimed) -> list[Generation | Response]:
        """Take over a run whose client has left, or that is a stream, once it can be; else wait a while."""
        if claimed.state is ClaimState.LEFT or self.generation.options.stream:
            try:
                generation = await self._adopted(scope, claimed.stream_id)
            except (UnknownStream, Unavailable):
                pass  # it is not kept, or was not handed off yet
            else:
                await self.claim.take(claimed.stream_id)
                return [generation]
        await asyncio.sleep(_POLL_S)
        return []

    async def _adopted(self, scope: Scope, stream_id: str) -> Generation:
        streams, stream = self.context.streams, self.generation.request.stream
        if streams is None or stream is None:
            raise UnknownStream("the answer to this request is not kept while it runs")
        adoption = await streams.adopt(stream_id, stream.tenant)
        return await continue_stream(self.context, scope["state"], streams, adoption)

    def _replay(self, scope: Scope, answer: bytes) -> Response:
        if not answer:
            raise HttpError(409, f"the request with this {_NAME} has finished, but its answer was too large to be kept")
        scope["state"].pop("stream_id", None)
        response = Response(answer, 200, {_REPLAYED: "true"})
        is_stream, stream_format = self.generation.options.stream, self.generation.shape.stream_format
        response.raw_headers += stream_format.headers if is_stream else ((b"content-type", b"application/json"),)
        return response
