"""One request and its answer on a connection: the app's messages as bytes."""

import asyncio
import http
import re
from collections.abc import Callable, Iterable

from starlette.types import ASGIApp, Message, Scope

from telemetry.logs import EventLogger

_log = EventLogger("server")
_LINES = {status.value: b"HTTP/1.1 %d %s\r\n" % (status, status.phrase.encode()) for status in http.HTTPStatus}
_BARE = frozenset((204, 304))
_UNSAFE = re.compile(rb"[\x00-\x1f\x7f]")
MAX_DROPPED_BYTES = 2**20  # how much a client may still send after its last answer


class HttpExchange:
    """Owner of the unread part of the body and the state of the answer. The app gets `receive` and `send`.

    The head of an answer is sent with its first body bytes. `keep_alive` may be set to False until then; it is also
    set to False if too much of the body is still to come, or if the client might not send the rest. `body_bytes`: the
    body's declared length, None if chunked; `num_written`: bytes of the answer so far.
    """

    def __init__(
        self, scope: Scope, transport: asyncio.Transport, default_headers: list[tuple[bytes, bytes]],
        answered: Callable[[], None], read_on: Callable[[], None], *, keep_alive: bool, expects: bool,
        body_bytes: int | None = 0,
    ) -> None:  # fmt: skip
        """`answered` is called when the answer is complete, `read_on` when there is room for more of the body."""
        self.keep_alive, self.body_bytes = keep_alive, body_bytes
        self._scope, self._transport, self._default_headers = scope, transport, default_headers
        self._answered, self._read_on, self._expects = answered, read_on, expects
        self._body, self._body_complete, self._fed_bytes = bytearray(), False, 0
        self._was_read, self._was_all_read = False, False
        self._changed: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._head: bytes | None = None
        self.started, self.complete = False, False
        self.gone, self.why_gone = False, ""
        self._when_gone: Callable[[], object] | None = None
        self._chunked, self._left = False, 0  # bytes of the body still to write; -1: until the connection closes
        self.num_written = 0

    @property
    def receive(self) -> "Receiving":
        """The `receive` of ASGI."""
        return Receiving(self)

    async def run(self, app: ASGIApp) -> None:
        """Run the app. An incomplete answer closes the connection, so that the client notices."""
        try:
            await app(self._scope, self.receive, self.send)
        except Exception as error:  # noqa: BLE001 - the outermost frame of a request
            _log.error("http_request_failed", error)
        finally:
            self._scope.pop("state", None)  # it refers to this: a cycle, which only the garbage collector would free
            if not self.complete and not self.gone:
                self._transport.abort()

    def feed(self, body: bytes) -> int:
        """Add a part of the body; return how many bytes are unread. After the answer, bytes are dropped."""
        self._fed_bytes += len(body)
        if self.complete or self.gone:
            return 0
        self._body += body
        self._notify_waiter()
        return len(self._body)

    def complete_body(self) -> None:
        """Mark the body as complete."""
        self._body_complete = True
        self._notify_waiter()

    def leave(self, why: str) -> None:
        """Mark the client as gone for the reason `why`."""
        self.gone, self.why_gone = True, why
        self._notify_waiter()
        self.resume()
        if not self.complete:
            self._report_gone()

    def when_gone(self, call: Callable[[], object] | None) -> None:
        """Call `call` once when the client disconnects, immediately if it already has; None cancels the callback."""
        self._when_gone = call
        if call is not None and self.gone:
            self._report_gone()

    def _report_gone(self) -> None:
        call, self._when_gone = self._when_gone, None
        if call is not None:
            call()

    def pause(self) -> None:
        """Block `send` until `resume`."""
        if self._writable is None:
            self._writable = asyncio.get_running_loop().create_future()

    def resume(self) -> None:
        """Unblock `send`."""
        waiting, self._writable = self._writable, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def whole_body(self) -> bytes | None:
        """Return the body if it is complete and unread, else None."""
        if not self._body_complete or self._was_all_read or self.gone or self._was_read:
            return None
        self._was_all_read = True
        body, self._body = bytes(self._body), bytearray()
        self._read_on()
        return body

    async def read(self) -> Message:
        """Return the body received since the last call, or http.disconnect once the client is gone or answered."""
        if self._expects and not self.started:
            self._expects = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not (self.gone or self.complete or self._body or (self._body_complete and not self._was_all_read)):
            self._read_on()
            self._changed = asyncio.get_running_loop().create_future()
            await self._changed
        if self.gone or self.complete:
            return {"type": "http.disconnect"}
        self._was_all_read, self._was_read = self._body_complete, True
        body, self._body = bytes(self._body), bytearray()
        self._read_on()
        return {"type": "http.request", "body": body, "more_body": not self._body_complete}

    async def send(self, message: Message) -> None:
        """Write a part of the answer, the ASGI way: wait while the client reads too slowly."""
        await self._can_write()
        if message["type"] == "http.response.start":
            self.start(message["status"], message.get("headers", ()))
        else:
            self.write(message.get("body", b""), more=message.get("more_body", False))

    def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Start the answer. Does nothing once the client is gone."""
        if not self.gone:
            assert not self.started, "an answer starts once"
            self.started = True
            self._head = self._head_of(status, headers)

    def write(self, content: bytes, *, more: bool = True) -> None:
        """Write a part of the body without waiting: http/protocol.py disconnects a client that does not read.

        Does nothing once the client is gone.
        """
        if self.gone:
            return
        assert self.started, "the head comes before the body"
        assert not self.complete, "the body ends once"
        if self._chunked:
            framed = b"%x\r\n%b\r\n" % (len(content), content) if content else b""
            if not more:
                framed += b"0\r\n\r\n"
        elif self._left == -1:
            framed = content
        else:
            framed = content[: self._left]
            self._left -= len(framed)
        if self._head is not None:
            framed, self._head = self._head + framed, None
        if framed:
            self.num_written += len(framed)  # first: the transport may call `pause`
            self._transport.write(framed)
        if not more:
            self._end()

    async def end(self, content: bytes) -> None:
        """Write the last part of the body, and end the answer once the client keeps up: usually with one write."""
        if self._writable is not None:
            self.write(content)
            await self._can_write()
            content = b""
        self.write(content, more=False)

    async def _can_write(self) -> None:
        while self._writable is not None and not self.gone:
            await self._writable

    def _head_of(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        parts = [_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        has_no_body = status in _BARE or self._scope["method"] == "HEAD"
        length: int | None = None
        for name, value in (*self._default_headers, *headers):
            assert not _UNSAFE.search(name + value), "a header has no control characters"
            if name == b"content-length":
                length = int(value)
            parts += (name, b": ", value, b"\r\n")
        self._left = 0 if has_no_body else length or 0
        if length is None and not has_no_body:
            if self._scope["http_version"] == "1.1":
                self._chunked = True
                parts.append(b"transfer-encoding: chunked\r\n")
            else:
                self.keep_alive = False  # in HTTP/1.0 only closing marks the end
                self._left = -1
        if self._leaves_too_much():
            self.keep_alive = False
        if not self.keep_alive:
            parts.append(b"connection: close\r\n")
        elif self._scope["http_version"] != "1.1":
            parts.append(b"connection: keep-alive\r\n")
        parts.append(b"\r\n")
        return b"".join(parts)

    def _leaves_too_much(self) -> bool:
        """Whether the rest of the body is of unknown length, or not worth reading for another request."""
        if self._body_complete:
            return False
        return self.body_bytes is None or self._expects or self.body_bytes - self._fed_bytes > MAX_DROPPED_BYTES

    def _end(self) -> None:
        self.complete = True
        if self._left > 0:
            _log.error("answer_too_short", path=self._scope["path"], missing=self._left)
            self.keep_alive = False
        self._body.clear()
        self._notify_waiter()
        self._answered()

    def _notify_waiter(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)


class Receiving:
    """An exchange's `receive`, which can also call back when the client disconnects before the answer is complete."""

    def __init__(self, exchange: HttpExchange) -> None:
        self._exchange = exchange
        self.when_gone = exchange.when_gone

    async def __call__(self) -> Message:
        """Return the next message."""
        return await self._exchange.read()

    @property
    def why_gone(self) -> str:
        """The reason why the client is gone; "" while it is connected."""
        return self._exchange.why_gone
