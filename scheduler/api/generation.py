"""Run one request and answer it, whole or as a stream; what the answer looks like is the surface's (`Shape`)."""

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from scheduler.api import served
from scheduler.api.errors import error_body, json_response, request_id_of
from scheduler.api.sse import DONE, ClientGone, EventWriter, event, until_disconnect, within
from scheduler.front import Front
from scheduler.pieces import Piece, TextOptions
from scheduler.request import GenerationRequest
from scheduler.stream import TextStream
from telemetry.logs import EventLogger
from wire.errors import Draining

_log = EventLogger("api")


@dataclass(frozen=True, slots=True)
class Ended:
    """One whole choice."""

    index: int
    text: str
    finish_reason: str | None
    stop_reason: str | int | None


class Shape(Protocol):
    """What one surface's answers look like."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the chunk that opens a choice's stream, if the surface has one."""
        ...

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """Return the chunk that carries `piece`."""
        ...

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        """Return the chunk that carries no choice but the token counts."""
        ...

    def whole(self, choices: list[Ended], usage: dict[str, int]) -> dict[str, Any]:
        """Return the whole answer."""
        ...


@dataclass(frozen=True, slots=True)
class Generation:
    """An ASGI response: runs `request` when called, and cancels it when the client goes away."""

    front: Front
    request: GenerationRequest
    text: TextOptions
    shape: Shape
    stream: bool
    include_usage: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises a PdserveError as long as nothing was sent."""
        with self.front.drain.request():
            self._log_taken(scope)
            run = self._answer_stream(scope, send) if self.stream else self._answer_whole(scope, receive, send)
            try:
                await until_disconnect(receive, run)
            except ClientGone as gone:
                _log.info("client_gone", request_id=self.request.request_id, reason=gone)

    def _log_taken(self, scope: Scope) -> None:
        ids = {"request_id": self.request.request_id, "http_id": request_id_of(scope)}
        _log.info("request_taken", **ids, prompts=len(self.request.prompts), n=self.request.params.n)

    async def _answer_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        output = self._output(scope)
        texts: dict[int, list[str]] = {}
        last: dict[int, Piece] = {}
        async with aclosing(output.pieces(self.front.dispatcher)) as pieces:
            async for piece in pieces:
                texts.setdefault(piece.index, []).append(piece.text)
                last[piece.index] = piece
        choices = [
            Ended(index, "".join(texts[index]), last[index].finish_reason, last[index].stop_reason)
            for index in sorted(last)
        ]
        timing = served.server_timing(output.served)
        headers = {"server-timing": timing} if timing else {}
        response = json_response(self.shape.whole(choices, served.usage(output)), 200, headers)
        await within(self.front.config.options.client_timeout, response(scope, receive, send))

    async def _answer_stream(self, scope: Scope, send: Send) -> None:
        """An error before the first event is an HTTP status; after it, an event that ends the stream without [DONE]."""
        writer = EventWriter(send, self.front.config.options.client_timeout)
        try:
            await self._write_pieces(writer, self._output(scope))
        except ClientGone:
            raise
        except asyncio.CancelledError:
            if writer.started and self.front.drain.draining:
                await writer.fail(error_body(Draining("the server is shutting down"), scope))
            raise
        except Exception as error:
            if not writer.started:
                raise
            await writer.fail(error_body(error, scope))

    def _output(self, scope: Scope) -> TextStream:
        """Times count from the request's arrival: reading, rendering and tokenising it are part of the wait."""
        arrived_s = scope["state"]["arrived_s"]
        return TextStream(self.request, self.text, self.front.tokens, self.front.observer, started_s=arrived_s)

    async def _write_pieces(self, writer: EventWriter, output: TextStream) -> None:
        opened: set[int] = set()
        async with aclosing(output.pieces(self.front.dispatcher)) as pieces:
            async for piece in pieces:
                content = event(self.shape.chunk(piece))
                if piece.index not in opened:
                    opened.add(piece.index)
                    opening = self.shape.opening(piece.index)
                    content = content if opening is None else event(opening) + content
                await writer.write(content)
        if self.include_usage:
            last = self.shape.usage_chunk(served.usage(output)) | {"pdserve": served.report(output.served)}
            await writer.write(event(last))
        await writer.write(DONE)
        await writer.end()
