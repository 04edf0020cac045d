"""Run one request for vectors or scores and answer it."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from scheduler.api.errors import json_response, request_id_of
from scheduler.api.pooling_body import PoolingBody
from scheduler.api.prepared_request import cache_salt_of, class_of, priority_of
from scheduler.api.sse import ClientGone, until_disconnect
from scheduler.api.usage import served_headers
from scheduler.api.vector_data import VectorBytes
from scheduler.app_context import AppContext
from scheduler.request import GenerationRequest
from scheduler.vector_run import VectorRun
from scheduler.vectors import Values
from telemetry.logs import EventLogger
from wire.errors import InvalidRequest
from wire.types import Pooling, SamplingParams

_log = EventLogger("api")
_NOTHING_GENERATED = SamplingParams(max_tokens=1)

BuildBody = Callable[[list[Values]], Awaitable[dict[str, Any] | VectorBytes]]
"""Builds the answer's body from the vector of each prompt, in order."""


def pooling_request(
    context: AppContext, request: Request, request_id: str, prompts: Sequence[tuple[int, ...]],
    poolings: Sequence[Pooling], body: PoolingBody,
) -> GenerationRequest:  # fmt: skip
    """Return the request that pools `prompts`, with one of `poolings` each, in the queue share of the client's key."""
    options, tenant = context.config.options, str(request.scope["state"].get("tenant", ""))
    return GenerationRequest(
        request_id, tuple(prompts), _NOTHING_GENERATED, options.first_token_timeout, options.stall_timeout,
        poolings=tuple(poolings), cache_salt=cache_salt_of(context, tenant, body.cache_salt), tenant=tenant,
        priority=priority_of(body.priority, request), request_class=class_of(request),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PooledResponse:
    """An ASGI response that runs `request` when called, and cancels it when the client disconnects.

    `build_body` builds the body from the vectors. At most --max-prompts prompts run at a time.
    """

    context: AppContext
    request: GenerationRequest
    build_body: BuildBody

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises a PdserveError only before anything was sent."""
        with self.context.drain:
            ids = {"request_id": self.request.request_id, "http_id": request_id_of(scope)}
            _log.info("request_accepted", **ids, prompts=len(self.request.prompts))
            try:
                await until_disconnect(receive, self._answer(scope, receive, send))
            except ClientGone as gone:
                _log.info("client_gone", request_id=self.request.request_id, reason=gone)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        options = self.context.config.options
        observer, arrived_s = self.context.observer_of(scope["headers"]), scope["state"]["arrived_s"]
        run = VectorRun(self.request, observer, at_once=options.max_prompts, started_s=arrived_s)
        try:
            vectors = await run.collect(self.context.dispatcher)
        except InvalidRequest as error:  # an instance's message crosses the wire, but the field's name does not
            first = str(error).partition(" ")[0]
            error.param = error.param or (first if first in ("dimensions", "task") else "input")
            raise
        response = _response(await self.build_body(vectors), served_headers(run.served))
        await response(scope, receive, send)


def _response(body: dict[str, Any] | VectorBytes, headers: dict[str, str]) -> Response:
    if not isinstance(body, VectorBytes):
        return json_response(body, 200, headers)
    metadata = {} if body.metadata is None else {"metadata": body.metadata.decode()}
    return Response(body.content, 200, headers | metadata, "application/octet-stream")
