"""One HTTP/1.1 connection to a worker: one request at a time, whose answer is passed on as it arrives."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, cast

import httptools

MAX_REFUSED_BYTES = 4096


class Pieces(Protocol):
    """A body that is generated while it is sent; `len` is its number of bytes."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[bytes]: ...


Body = bytes | Pieces


class AnswerCut(ConnectionError):
    """The connection closed before the end of the answer. `is_empty`: before its first byte."""

    def __init__(self, *, is_empty: bool) -> None:
        super().__init__("the connection closed before the answer" + ("" if is_empty else " was complete"))
        self.is_empty = is_empty


class AnswerRefused(Exception):
    """The answer does not have the wanted status and type, and its body is longer than an error message."""


class HttpAnswer:
    """The answer to one request. `take` gets each part of the body of a 200 of type `wanted` (of any type if empty).

    The start of any other body is kept in `refused`. What `take` raises ends the request.
    """

    def __init__(self, take: Callable[[bytes], None], wanted: str = "") -> None:
        self.status = 0
        self.content_type = ""
        self.is_wanted = False
        self.refused = bytearray()
        self.take = take
        self._wanted = wanted

    def begin(self, status: int) -> None:
        """Record the status; `content_type` is known by then."""
        self.status = status
        self.is_wanted = status == 200 and self._wanted in ("", self.content_type)

    def refuse(self, data: bytes) -> None:
        """Keep a part of a refused body. Raises AnswerRefused once it is too long."""
        self.refused += data
        if len(self.refused) > MAX_REFUSED_BYTES:
            raise AnswerRefused


class HttpConnection(asyncio.Protocol):
    """Owner of one socket. `used_at`: when the last request ended."""

    def __init__(self, on_idle_lost: Callable[[], None] = lambda: None) -> None:
        """`on_idle_lost` is called when the peer closes the connection between requests."""
        self._on_idle_lost = on_idle_lost
        self._is_closed_here = False
        self.used_at = 0.0
        self._is_idle = True
        self._parser: Any = httptools.HttpResponseParser(self)
        self._answer: HttpAnswer | None = None
        self._ended: asyncio.Future[None] | None = None
        self._parts: list[bytes] = []
        self._has_length = self._keeps_alive = self._is_empty = self._is_complete = False
        self._can_write = asyncio.Event()
        self._can_write.set()

    @property
    def is_usable(self) -> bool:
        """Whether it is open and runs no request."""
        return self._is_idle and not self._transport.is_closing()

    async def exchange(self, request: bytes, answer: HttpAnswer, more: Iterable[bytes] = ()) -> None:
        """Send a request and pass on its whole answer. Cancelling closes the connection, and so aborts the request.

        `more` parts of the body are generated as the peer reads them. Raises ConnectionError, and what `answer` raises.
        """
        loop = asyncio.get_running_loop()
        self._answer, self._ended, self._is_idle = answer, loop.create_future(), False
        self._has_length, self._is_empty, self._is_complete = False, True, False
        self._transport.write(request)
        try:
            is_sent = not more or await self._send(more, self._ended)
            await self._ended
            self._is_idle, self.used_at = self._keeps_alive and is_sent, loop.time()
        finally:
            self._answer = self._ended = None
            if not self._is_idle:
                self.close()

    async def _send(self, pieces: Iterable[bytes], ended: "asyncio.Future[None]") -> bool:
        """Write each piece in its own turn of the loop; return whether all were written before the answer ended."""
        for piece in pieces:
            await asyncio.sleep(0)
            await self._can_write.wait()
            if ended.done():
                return False
            self._transport.write(piece)
        return True

    def close(self) -> None:
        """Close the connection at once."""
        self._is_closed_here = True
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def pause_writing(self) -> None:
        """Stop writing pieces for now."""
        self._can_write.clear()

    def resume_writing(self) -> None:
        """Continue writing pieces."""
        self._can_write.set()

    def data_received(self, data: bytes) -> None:
        """Parse the data and pass on the body's part of it; unexpected data closes the connection."""
        answer = self._answer
        if answer is None:
            self.close()
            return
        self._is_empty = False
        try:
            self._parser.feed_data(data)
            if self._parts:
                parts, self._parts = self._parts, []
                content = parts[0] if len(parts) == 1 else b"".join(parts)
                if answer.is_wanted:
                    answer.take(content)
                else:
                    answer.refuse(content)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._end(ConnectionError(f"its answer is not HTTP: {error}"))
        except Exception as error:  # noqa: BLE001 - passed to the request's task
            self._end(error)
        else:
            if self._is_complete:
                self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request; an answer without a length ends with the connection."""
        is_whole = exc is None and self._answer is not None and self._answer.status > 0 and not self._has_length
        self._end(None if is_whole else exc or AnswerCut(is_empty=self._is_empty))
        if self._is_idle and not self._is_closed_here:
            self._on_idle_lost()

    def on_message_begin(self) -> None:
        """Refuse a second answer to one request: the next request would get it."""
        if self._is_complete:
            raise ValueError("two answers to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep the body's type, and whether its length is known."""
        name = name.lower()
        if name == b"content-type" and self._answer is not None:
            self._answer.content_type = value.decode("latin-1").partition(";")[0].strip().lower()
        self._has_length |= name in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        """Keep the status, and whether the connection can be used again."""
        self._keeps_alive = self._parser.should_keep_alive()
        if self._answer is not None:
            self._answer.begin(self._parser.get_status_code())

    def on_body(self, part: bytes) -> None:
        """Keep a part of the body until all that has arrived is parsed."""
        self._parts.append(part)

    def on_message_complete(self) -> None:
        """Mark the answer as complete, unless its status is an interim one (1xx)."""
        self._is_complete = self._answer is not None and self._answer.status >= 200

    def _end(self, error: Exception | None) -> None:
        self._can_write.set()  # nothing more is written
        if self._ended is not None and not self._ended.done():
            if error is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(error)
