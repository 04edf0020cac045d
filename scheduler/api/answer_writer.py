"""One answer to a client: its status, its request id, and a body that can be written without waiting."""

import asyncio
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, Protocol

from starlette.types import Message, Send

from scheduler.api.load_report import ANSWER_HEADER

STREAM_HEADER = b"x-pdserve-stream"
Headers = Iterable[tuple[bytes, bytes]]


class ByteSink(Protocol):
    """Where an answer's bytes go. scheduler/http/exchange.py implements it, and QueuedSend for any `send`."""

    def start(self, status: int, headers: Headers) -> None:
        """Start the answer."""
        ...

    def write(self, content: bytes) -> None:
        """Write a part of the body without waiting."""
        ...

    async def end(self, content: bytes) -> None:
        """Write the last part of the body, and end the answer once the client keeps up."""
        ...


class AnswerWriter:
    """Adds the request id to the response headers, under the names `id_headers`; records status and completeness.

    A whole answer goes through `send`, a stream through `start`, `write` and `end`. An endpoint adds headers by setting
    values in `state`: `warning`, `load_report` (a function that returns load_report.py's header) and, sent only with
    status 200, the `stream_id` of a kept stream.
    """

    def __init__(
        self, sink: ByteSink, send: Send, shown_id: str, state: Mapping[str, Any],
        id_headers: tuple[bytes, ...] = (b"x-request-id",),
    ) -> None:  # fmt: skip
        self.status: int | None = None
        self.complete = False
        self.write = sink.write
        self._sink = sink
        self._send = send
        self._id_fields = [(name, shown_id.encode()) for name in id_headers]
        self._state = state

    async def send(self, message: Message) -> None:
        """Forward one message."""
        if message["type"] == "http.response.start":
            message = {**message, "headers": self._answer_headers(message["status"], message.get("headers", ()))}
        elif not message.get("more_body"):
            self.complete = True
        await self._send(message)

    def start(self, status: int, headers: Headers) -> None:
        """Start the answer."""
        self._sink.start(status, self._answer_headers(status, headers))

    async def end(self, content: bytes) -> None:
        """Write the last part of the body and end the answer."""
        self.complete = True
        await self._sink.end(content)

    def _answer_headers(self, status: int, headers: Headers) -> Headers:
        self.status = status
        added = list(self._id_fields)
        if "warning" in self._state:
            added.append((b"warning", self._state["warning"].encode()))
        if status == HTTPStatus.OK and "stream_id" in self._state:
            added.append((STREAM_HEADER, self._state["stream_id"].encode()))
        if (report := self._state.get("load_report")) is not None:
            added.append((ANSWER_HEADER, report().encode()))
        return [*headers, *added]


class QueuedSend:
    """A ByteSink over any ASGI `send`: a task sends the queued parts in order; `close` stops it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._sending: asyncio.Task[None] | None = None

    def start(self, status: int, headers: Headers) -> None:
        """Start the answer."""
        self._messages.put_nowait({"type": "http.response.start", "status": status, "headers": headers})
        self._sending = asyncio.create_task(self._send_all())

    def write(self, content: bytes) -> None:
        """Write a part of the body without waiting."""
        self._messages.put_nowait({"type": "http.response.body", "body": content, "more_body": True})

    async def end(self, content: bytes) -> None:
        """Write the last part of the body and end the answer, once all of it is sent."""
        self._messages.put_nowait({"type": "http.response.body", "body": content, "more_body": False})
        assert self._sending is not None, "start() comes before end()"
        await self._sending

    def close(self) -> None:
        """Stop sending."""
        if self._sending is not None:
            self._sending.cancel()

    async def _send_all(self) -> None:
        more = True
        while more:
            message = await self._messages.get()
            await self._send(message)
            more = message.get("more_body", True)
