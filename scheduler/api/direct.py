"""Call the endpoints of fixed paths directly; all other requests go through the app's router."""

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from scheduler.api.errors import HttpError, answer_http_error

Endpoint = Callable[[Request], Awaitable[ASGIApp]]


class Direct:
    """ASGI wrapper around the app. `endpoints` by (method, path); their errors reach the caller as the app's would."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[tuple[str, str], Endpoint]) -> None:
        self._app = app
        self._endpoints = dict(endpoints)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        endpoint = self._endpoints.get((scope["method"], scope["path"]))
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await endpoint(request)
        except HttpError as error:
            response = await answer_http_error(request, error)
        await response(scope, receive, send)
