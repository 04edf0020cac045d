"""The outermost ASGI layer: assigns ids, checks API keys, counts requests and answers unhandled errors."""

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scheduler.api.errors import error_response, unauthorized
from scheduler.api.request_ids import clean_client_id, new_id
from scheduler.api.sse import ClientGone
from scheduler.http.burst_limit import BurstLimit
from scheduler.http.keys import Keys
from scheduler.observability.metrics import Metrics
from telemetry.capped_logs import CappedLog
from telemetry.logs import EventLogger

CLIENT_GONE = 499
_log = EventLogger("api")


class Gate:
    """ASGI wrapper around the app. `routes` maps exact paths to metric labels; other paths are `other`.

    The path is the received one without `root_path`: key check, label and route use the same text. The scope's `state`
    gets request_id, arrived_s, refusals, and the key's tenant, "" where no key is required. If an endpoint sets
    `warning` in it, that is sent as the header of that name; `client_id` is the one of `ids_in_use` that this answer
    shows.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, routes: Mapping[str, str], keys: Keys | None = None, root_path: str = ""
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes
        self._keys = keys or Keys()
        self._root_path = root_path.rstrip("/")
        self._refusals = CappedLog(_log)
        self._turnstile = BurstLimit()
        self._ids_in_use: set[str | None] = set()  # client ids shown by running requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        path = self._strip_root(scope)
        own_id, client_id = new_id("req"), _client_id(scope)
        tenant = self._keys.admit(path, scope["headers"])
        scope.setdefault("state", {}).update(
            request_id=own_id, arrived_s=asyncio.get_running_loop().time(), refusals=self._refusals, tenant=tenant,
            ids_in_use=self._ids_in_use,
        )  # fmt: skip
        exchange = _Exchange(send, client_id or own_id, scope["state"])
        try:
            if scope["method"] == "POST" and tenant is not None:  # requests without a key do not delay others
                await self._turnstile.enter()
            app = self._app if tenant is not None else unauthorized()
            await app(scope, receive, exchange.send)
        except ClientGone:
            pass
        except Exception as error:
            if exchange.status is None:
                await error_response(error, scope)(scope, receive, exchange.send)
            elif not exchange.complete:
                raise  # the server closes the connection, so that the client sees an incomplete answer
        finally:
            self._ids_in_use.discard(scope["state"].get("client_id"))
            status = exchange.status or CLIENT_GONE
            self._metrics.http_request(self._routes.get(path, "other"), scope["method"], status)
            _log.debug("http_request", request_id=own_id, client_id=client_id, path=path, status=status)

    def _strip_root(self, scope: Scope) -> str:
        """Remove the prefix that a reverse proxy left in the path, and return the path."""
        path: str = scope["path"]
        if self._root_path and path.startswith(self._root_path + "/"):
            path = scope["path"] = path.removeprefix(self._root_path)
        return path


class _Exchange:
    """Forwards messages; adds the request id to the response headers, records the status and completeness."""

    def __init__(self, send: Send, shown_id: str, state: Mapping[str, Any]) -> None:
        self.status: int | None = None
        self.complete = False
        self._send = send
        self._shown_id = shown_id
        self._state = state

    async def send(self, message: Message) -> None:
        """Forward one message."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self._shown_id.encode())]
            if "warning" in self._state:
                headers.append((b"warning", self._state["warning"].encode()))
            message = {**message, "headers": headers}
        elif not message.get("more_body"):
            self.complete = True
        await self._send(message)


def _client_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return clean_client_id(value.decode("latin-1"))
    return None
