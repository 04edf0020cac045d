"""The outermost ASGI layer: assigns ids, checks API keys, counts requests and answers unhandled errors."""

import asyncio
from collections.abc import Collection, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from scheduler.api.answer_writer import AnswerWriter, ByteSink, QueuedSend
from scheduler.api.api_format import OPENAI_FORMAT, ApiFormat
from scheduler.api.errors import error_response, unauthorized
from scheduler.api.images import release_images
from scheduler.api.request_ids import clean_client_id, new_id
from scheduler.api.sse import ClientGone
from scheduler.http.burst_limit import BurstLimit
from scheduler.http.header import header_of
from scheduler.http.keys import Keys
from scheduler.observability.metrics import Metrics
from telemetry.capped_logs import CappedLog
from telemetry.logs import EventLogger

CLIENT_GONE = 499
_ID_LENGTH = 32  # as in vLLM
_log = EventLogger("api")


class Gate:
    """ASGI wrapper around the app. `routes` maps exact paths to metric labels; the label of other paths is `other`.

    `formats` maps a path to its API, also for unknown paths below it; all other paths have OpenAI's. Answers of
    `without_id` paths have an id only if the client sent one. The key check, the label, the format and the route all
    use the received path without `root_path`. The scope's `state` gets request_id, the response headers' shown_id,
    api_format, arrived_s, refusals, ids_in_use, the `answer` to write to, and the key's tenant ("" if no key is
    required). An endpoint that shows the client's own id adds it to `ids_in_use` and stores it as `client_id`.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, routes: Mapping[str, str], keys: Keys | None = None, root_path: str = "",
        formats: Mapping[str, ApiFormat] | None = None, without_id: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._app = app
        self._metrics = metrics
        self._routes = routes
        self._keys = keys or Keys()
        self._formats = formats or {}
        self._without_id = without_id
        self._root_path = root_path.rstrip("/")
        self._refusals = CappedLog(_log)
        self._turnstile = BurstLimit()
        self._ids_in_use: set[str | None] = set()  # client ids shown by running requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        path = self._strip_root(scope)
        own_id, client_id = new_id("req")[:_ID_LENGTH], clean_client_id(header_of(scope, b"x-request-id") or "")
        shown_id, api_format = client_id or own_id, self._formats.get(path) or self._format_below(path)
        tenant = self._keys.admit(path, scope["headers"])
        scope.setdefault("state", {}).update(
            request_id=own_id, arrived_s=asyncio.get_running_loop().time(), refusals=self._refusals, tenant=tenant,
            ids_in_use=self._ids_in_use, shown_id=shown_id, api_format=api_format,
        )  # fmt: skip
        exchange = scope["state"].get("exchange")
        is_bare = exchange is not None and send == exchange.send  # else a wrapper, such as CORS's, adds headers
        queued = None if is_bare else QueuedSend(send)
        sink: ByteSink = exchange if queued is None else queued
        id_headers = () if client_id is None and path in self._without_id else api_format.id_headers
        answer = scope["state"]["answer"] = AnswerWriter(sink, send, shown_id, scope["state"], id_headers)
        try:
            if scope["method"] == "POST" and tenant is not None:  # requests without a key do not delay others
                await self._turnstile.enter()
            app = self._app if tenant is not None else unauthorized(scope)
            await app(scope, receive, answer.send)
        except ClientGone:
            pass
        except Exception as error:
            if answer.status is None:
                await error_response(error, scope)(scope, receive, answer.send)
            elif not answer.complete:
                raise  # the server closes the connection, so that the client sees an incomplete answer
        finally:
            if queued is not None:
                queued.close()
            self._ids_in_use.discard(scope["state"].get("client_id"))
            release_images(scope)
            del scope["state"]["answer"]  # a cycle: it refers to the state
            status = answer.status or CLIENT_GONE
            self._metrics.http_request(self._routes.get(path, "other"), scope["method"], status)
            _log.debug("http_request", request_id=own_id, client_id=client_id, path=path, status=status)

    def _format_below(self, path: str) -> ApiFormat:
        above = (known for route, known in self._formats.items() if path.startswith(f"{route}/"))
        return next(above, OPENAI_FORMAT)

    def _strip_root(self, scope: Scope) -> str:
        """Remove the prefix that a reverse proxy left in the path, and return the path."""
        path: str = scope["path"]
        if self._root_path and path.startswith(self._root_path + "/"):
            path = scope["path"] = path.removeprefix(self._root_path)
        return path
