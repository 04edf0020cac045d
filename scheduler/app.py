"""The HTTP surface: which path is served by which endpoint."""

from collections.abc import Awaitable, Callable
from typing import cast

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from scheduler.api.chat import create_chat_completion
from scheduler.api.completions import create_completion
from scheduler.api.errors import HttpError, answer_error, answer_http_error
from scheduler.api.gate import Gate
from scheduler.api.health import health, metrics, ready
from scheduler.api.models import list_models, retrieve_model
from scheduler.api.sse import ClientGone
from scheduler.front import Front
from wire.errors import PdserveError

Endpoint = Callable[[Front, Request], Awaitable[ASGIApp]]

ROUTES: tuple[tuple[str, str, Endpoint], ...] = (
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{name:path}", retrieve_model),
    ("POST", "/v1/completions", create_completion),
    ("POST", "/v1/chat/completions", create_chat_completion),
    ("GET", "/health", health),
    ("GET", "/ready", ready),
    ("GET", "/metrics", metrics),
)


def build_app(front: Front) -> ASGIApp:
    """Return the ASGI app that serves `front`. It has no documentation pages and no other routes."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    for method, path, endpoint in ROUTES:
        app.add_route(path, _bound(endpoint, front), methods=[method])
    app.add_exception_handler(ClientGone, _pass_on)
    app.add_exception_handler(PdserveError, answer_error)
    app.add_exception_handler(Exception, answer_error)
    app.add_exception_handler(HttpError, answer_http_error)
    app.add_exception_handler(HTTPException, answer_http_error)
    return Gate(app, front.metrics, {path: path for _, path, _ in ROUTES})


def _bound(endpoint: Endpoint, front: Front) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint's answer is any ASGI app: starlette only calls it."""

    async def serve(request: Request) -> Response:
        return cast("Response", await endpoint(front, request))

    return serve


async def _pass_on(_: Request, error: Exception) -> Response:
    """A client that went away gets no answer: the gate counts it."""
    raise error
