"""Send requests to an ASGI app in this process, without a socket."""

import asyncio
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Scope

from batch.backend import NO_HEADERS, Answer
from wire.errors import Unavailable

_HOST = "127.0.0.1"


class AppBackend:
    """A BatchBackend over `app`. After a cancellation the app has `grace_s` seconds to finish by itself."""

    def __init__(self, app: ASGIApp, *, grace_s: float = 10.0) -> None:
        self._app = app
        self._grace_s = grace_s

    async def send(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = NO_HEADERS
    ) -> Answer:  # fmt: skip
        """Return the app's answer. Raises Unavailable if the app fails or ends without one."""
        exchange = _Exchange(body)
        task = asyncio.ensure_future(self._app(_scope(method, path, body, headers), exchange.receive, exchange.send))
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            exchange.is_complete.set()
            await self._end(task)
            raise
        if task.cancelled():
            raise Unavailable(f"{method} {path}: the app cancelled the request")
        if (error := task.exception()) is not None:
            raise Unavailable(f"{method} {path}: the app failed with {type(error).__name__}") from error
        return exchange.answer(f"{method} {path}")

    async def _end(self, task: "asyncio.Future[None]") -> None:
        """Wait up to `grace_s` seconds for the app to finish, then cancel it."""
        try:
            await asyncio.wait((task,), timeout=self._grace_s)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait((task,), timeout=self._grace_s)
            if task.done() and not task.cancelled():
                task.exception()  # mark it as retrieved: nothing handles it any more


class _Exchange:
    """The app's receive and send channels for one request. Owns the answer received so far."""

    def __init__(self, body: bytes) -> None:
        self.is_complete = asyncio.Event()
        self._body: bytes | None = body
        self._status: int | None = None
        self._headers: dict[str, str] = {}
        self._parts: list[bytes] = []

    async def receive(self) -> Message:
        """Return the body once; then wait until the answer is complete or the request is cancelled."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.is_complete.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Store the start of the answer and its parts."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = {
                name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message.get("headers", ())
            }
        elif message["type"] == "http.response.body":
            self._parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                self.is_complete.set()

    def answer(self, request: str) -> Answer:
        """Return the answer. Raises Unavailable unless it is complete."""
        if self._status is None or not self.is_complete.is_set():
            raise Unavailable(f"{request}: the app ended before its answer was complete")
        return Answer(self._status, self._headers, b"".join(self._parts))


def _scope(method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Scope:
    own = {"host": _HOST, "content-length": str(len(body))} | ({"content-type": "application/json"} if body else {})
    shown = own | {name.lower(): value for name, value in headers.items()}
    plain, _, query = path.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": plain,
        "raw_path": plain.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in shown.items()],
        "client": (_HOST, 0),
        "server": (_HOST, 0),
        "state": {},
    }
