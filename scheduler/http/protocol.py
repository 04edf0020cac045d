"""HTTP/1.1 on one connection: httptools parses; input and waiting are limited in bytes, count and time.

    head (15 s) --> request runs (body: scheduler/api/read_json.py) --> answered
      ^                                                                     |
      +---- first byte ---- idle (30 s) <---- the rest of its body (15 s) <-+
                            closed <---- at most 1 MiB more, dropped (15 s) <-+

A client that reads less than a tenth of the pending output in 30 s is disconnected. A request that exceeds a limit is
refused after the pending answers, and its connection is closed.
"""

import asyncio
from collections import deque
from typing import Any
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import ServerState

from scheduler.http.bad_request import MAX_HEAD_BYTES, MAX_HEADERS, HeadTooLarge, NotHttp1, refusal
from scheduler.http.exchange import MAX_DROPPED_BYTES, HttpExchange

SLICE_BYTES = 4 * 2**10  # parsed at once: a queued request costs far more than its bytes
PAUSE_BODY_BYTES = 64 * 2**10
_MIN_READ = 0.1  # share of the pending output to be read within `reader_s`


class HttpProtocol(asyncio.Protocol):
    """Owner of one connection: its parser, the running exchange, the queued ones, and two timers."""

    head_s = 15.0
    """Seconds for a request's head, and for the rest of a body whose request is already answered (413, 404, ...)."""

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None, *, reader_s: float = 30.0,
    ) -> None:  # fmt: skip
        """Called by uvicorn for each connection; `reader_s`: seconds in which a client must read the minimum."""
        if not config.loaded:
            config.load()
        self._app: ASGIApp = config.loaded_app
        self._idle_s: float = config.timeout_keep_alive
        self._reader_s = reader_s
        self._state = server_state
        self._loop = _loop or asyncio.get_running_loop()
        self._parser: Any = httptools.HttpRequestParser(self)
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)  # later bytes are never answered
        self._exchange: HttpExchange | None = None
        self._reading: HttpExchange | None = None  # the one whose body is being read, running or queued
        self._waiting: deque[HttpExchange] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._in_head, self._head_bytes = False, 0
        self._called_back, self._silent_bytes = False, 0  # whether the parser called back, and bytes since it last did
        self._unparsed: bytes | memoryview = b""  # received after a queued request
        self._is_first, self._closing = True, False
        self._refusal = b""  # written last
        self._has_more, self._dropped_bytes = False, 0  # whether ignored bytes may arrive, and how many did
        self._num_written = 0  # by the complete answers
        self._why_gone = "the client disconnected"

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start waiting for a request head."""
        self.transport = transport
        self._state.connections.add(self)  # type: ignore[arg-type]  # uvicorn types it for its own protocols only
        peer, own = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        self._client, self._server = _address(peer), _address(own)
        self._scheme = "https" if transport.get_extra_info("sslcontext") else "http"
        self._expect_within(self.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify every exchange that its client is gone."""
        self._closing = True
        self._expect_within(None)
        self._stop_unread_timer()
        self._state.connections.discard(self)
        for exchange in (self._exchange, *self._waiting):
            if exchange is not None:
                exchange.leave(self._why_gone)
        self._waiting.clear()
        self._parser = None

    def eof_received(self) -> None:
        """Treat a half-closed client as gone: the transport closes."""

    def data_received(self, data: bytes) -> None:
        """Parse the data, or drop it if the connection is only waiting to be closed."""
        if self._closing:
            self._drop(len(data))
            return
        self._unparsed = bytes(self._unparsed) + data if self._unparsed else data
        self._parse()

    def _parse(self) -> None:
        """Parse in slices until a request is queued behind the running one; until that is answered, the rest waits."""
        while self._unparsed and not self._waiting and not self._closing:
            came = memoryview(self._unparsed)
            self._unparsed = came[SLICE_BYTES:]
            self._parse_slice(came[:SLICE_BYTES])

    def _parse_slice(self, data: memoryview) -> None:
        """Parse; refuse a head that is too long, has too many fields or is not HTTP.

        The parser does not report endless fields, chunk sizes or trailers, so their bytes are counted here.
        """
        was_in_head, self._called_back = self._in_head, False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._stop_reading()
        except httptools.HttpParserError as error:
            self._refuse(error.__context__)
            return
        self._silent_bytes = 0 if self._called_back else self._silent_bytes + len(data)
        if self._silent_bytes > MAX_HEAD_BYTES:
            self._refuse(HeadTooLarge())
        elif self._in_head and not was_in_head and self._exchange is None and not self._is_first:
            self._expect_within(self.head_s)

    def pause_writing(self) -> None:
        """Called when the client reads more slowly than the server writes."""
        self._wait_for_reader(int(_MIN_READ * self.transport.get_write_buffer_size()) or 1)
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        """Called when the client has caught up."""
        self._stop_unread_timer()
        if self._exchange is not None:
            self._exchange.resume()

    def shutdown(self) -> None:
        """Called by uvicorn on shutdown: close after the running answer."""
        if self._exchange is None:
            self.transport.close()
        else:
            self._exchange.keep_alive = False

    def on_message_begin(self) -> None:
        """Start a new request."""
        self._called_back = True
        self._in_head, self._head_bytes = True, 0
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []

    def on_url(self, url: bytes) -> None:
        """Add a part of the request target."""
        self._called_back = True
        self._url += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header field; a trailer is counted and ignored."""
        self._called_back = True
        if self._in_head:
            self._headers.append((name.lower(), value))
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        """Start the request, or queue it behind the running one."""
        self._in_head, self._is_first, self._called_back = False, False, True
        self._expect_within(None)
        version = self._parser.get_http_version()
        num_hosts = sum(name == b"host" for name, _ in self._headers)
        if version not in ("1.0", "1.1") or num_hosts > 1 or (version == "1.1" and not num_hosts):
            raise NotHttp1
        url = httptools.parse_url(self._url)
        raw_path = url.path or b"/"
        path = raw_path.decode("ascii")
        scope: dict[str, Any] = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": version,
            "method": self._parser.get_method().decode("ascii"), "scheme": self._scheme, "server": self._server,
            "client": self._client, "root_path": "", "headers": self._headers, "state": {},
            "path": unquote(path) if "%" in path else path, "raw_path": raw_path, "query_string": url.query or b"",
        }  # fmt: skip
        keep_alive = version == "1.1" and self._parser.should_keep_alive() and not self._parser.should_upgrade()
        expects = any(name == b"expect" and value.lower() == b"100-continue" for name, value in self._headers)
        self._reading = exchange = HttpExchange(
            scope, self.transport, self._state.default_headers, self._on_answered, self._read_on,
            keep_alive=keep_alive, expects=expects, body_bytes=_body_bytes(self._headers),
        )  # fmt: skip
        scope["state"]["exchange"] = exchange
        if self._exchange is None:
            self._start(exchange)
        else:
            self._waiting.append(exchange)
            self.transport.pause_reading()

    def on_body(self, body: bytes) -> None:
        """Add a part of a body; pause reading while too much of it is unread."""
        self._called_back = True
        if self._reading is not None and self._reading.feed(body) > PAUSE_BODY_BYTES:
            self.transport.pause_reading()

    def on_message_complete(self) -> None:
        """Complete the body."""
        self._called_back = True
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.complete_body()
            if self._exchange is None:
                self._expect_within(self._idle_s)

    def _start(self, exchange: HttpExchange) -> None:
        self._exchange = exchange
        if self._unread_timer is not None:
            exchange.pause()
        task = self._loop.create_task(exchange.run(self._app))
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)

    def _read_on(self) -> None:
        """Resume reading after the app read the body, at least to notice a disconnect."""
        if not self._waiting:
            self.transport.resume_reading()

    def _on_answered(self) -> None:
        """Continue after an answer: start the next request, wait for one, or close."""
        self._state.total_requests += 1
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        self._num_written += exchange.num_written
        if not exchange.keep_alive:
            self._close()
        elif self._waiting:
            self._start(self._waiting.popleft())
            self._parse()
        elif self._closing:
            self._close()
        else:
            self.transport.resume_reading()
            self._expect_within(self.head_s if self._reading is not None or self._in_head else self._idle_s)

    def _close(self) -> None:
        """Close after the pending output; read on first if the client is sending: a reset would lose its answers."""
        has_more = bool(self._has_more or self._reading or self._unparsed)
        self._closing, self._unparsed = True, b""
        if self._refusal:
            self.transport.write(self._refusal)
        if not has_more:
            self.transport.close()
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.transport.resume_reading()
        self._expect_within(self.head_s)

    def _drop(self, num_bytes: int) -> None:
        """Count ignored bytes, read to notice a disconnect; close beyond a limit once everything is answered."""
        self._has_more = True
        if self._exchange is None:
            self._dropped_bytes += num_bytes
            if self._dropped_bytes > MAX_DROPPED_BYTES:
                self.transport.close()

    def _wait_for_reader(self, least_bytes: int) -> None:
        """Disconnect a client that reads less within `reader_s`: its large answer would occupy memory for long."""
        unread_bytes, written_before = self.transport.get_write_buffer_size(), self._all_written()

        def look() -> None:
            output_bytes = unread_bytes + self._all_written() - written_before
            read = output_bytes - self.transport.get_write_buffer_size()
            if read >= least_bytes:
                self._wait_for_reader(least_bytes)
                return
            self._why_gone = f"the client read {read or 'nothing'} of {output_bytes} bytes in {self._reader_s:g} s"
            self.transport.abort()

        self._unread_timer = self._loop.call_later(self._reader_s, look)

    def _all_written(self) -> int:
        return self._num_written + (0 if self._exchange is None else self._exchange.num_written)

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES or len(self._headers) > MAX_HEADERS:
            raise HeadTooLarge

    def _stop_reading(self) -> None:
        """Handle an upgrade request: answer it as HTTP and read nothing after it."""
        if self._reading is not None:
            self.on_message_complete()
        self._closing = True

    def _refuse(self, why: BaseException | None) -> None:
        """Stop parsing: finish the pending answers, then send a refusal unless the bad request is answered already."""
        self._expect_within(None)
        self._closing = self._has_more = True
        broken, self._reading = self._reading, None
        if broken is not None and broken.started and not broken.complete:
            self.transport.abort()  # its answer cannot be completed
            return
        if broken is None or not broken.started:
            self._refusal = refusal(why)
        if broken is not None:
            self._drop_exchange(broken)
        if self._exchange is None:
            self._close()

    def _drop_exchange(self, broken: HttpExchange) -> None:
        broken.leave("its body is not valid HTTP")
        if broken is self._exchange:
            self._exchange = None
        elif broken in self._waiting:
            self._waiting.remove(broken)

    def _expect_within(self, seconds: float | None) -> None:
        """Abort unless the client sends what is expected within `seconds`; None expects nothing."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self._loop.call_later(seconds, self.transport.abort)


def _body_bytes(headers: list[tuple[bytes, bytes]]) -> int | None:
    """Return the declared length, checked by the parser; None for a chunked body."""
    for name, value in headers:
        if name == b"content-length":
            return int(value[-20:])  # there may be many leading zeros
        if name == b"transfer-encoding":
            return None
    return 0


def _address(name: Any) -> tuple[str, int] | None:
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None
