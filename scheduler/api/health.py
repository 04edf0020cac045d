"""GET /health, /ready and /metrics: liveness, readiness and Prometheus metrics."""

from starlette.requests import Request
from starlette.responses import Response

from scheduler.api.errors import json_response
from scheduler.app_context import AppContext, ReadyReport


async def health(context: AppContext, _: Request) -> Response:
    """Return 200 while this process works, else 503 with the reason."""
    reason = context.health()
    return json_response({"status": "ok"}) if reason is None else json_response({"status": reason}, 503)


async def ready(context: AppContext, _: Request) -> Response:
    """Return 200 if a request would be served now, else 503 with what is missing."""
    state = context.readiness()
    if context.drain.draining:
        state = ReadyReport(False, ("the server is shutting down", *state.missing), state.view)
    body = {**state.view, "ready": state.ready, "missing": list(state.missing)}
    return json_response(body, 200 if state.ready else 503)


async def metrics(context: AppContext, _: Request) -> Response:
    """Return all metrics in Prometheus' text format."""
    return Response(context.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")
