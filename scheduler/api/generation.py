"""Run one request and answer it, as a whole or as a stream; an `AnswerShape` formats the answer."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from scheduler.api import served
from scheduler.api.answer_options import AnswerOptions
from scheduler.api.errors import error_body, json_response, request_id_of
from scheduler.api.gathered import Gathered
from scheduler.api.keep_alive import COMMENT, with_quiet
from scheduler.api.shape import AnswerShape, prompt_report
from scheduler.api.sse import DONE, ClientGone, EventWriter, event, until_disconnect
from scheduler.app_context import AppContext
from scheduler.request import GenerationRequest
from scheduler.stream import TextStream
from scheduler.text.pieces import TextOptions, TextPiece
from telemetry.logs import EventLogger
from wire.errors import Draining

_log = EventLogger("api")


@dataclass(frozen=True, slots=True)
class Generation:
    """An ASGI response that runs `request` when called, and cancels it when the client disconnects."""

    front: AppContext
    request: GenerationRequest
    text: TextOptions
    shape: AnswerShape
    asked: AnswerOptions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises a PdserveError only before anything was sent."""
        with self.front.drain.request():
            self._log_taken(scope)
            run = self._answer_stream(scope, send) if self.asked.stream else self._answer_whole(scope, receive, send)
            try:
                await until_disconnect(receive, run)
            except ClientGone as gone:
                _log.info("client_gone", request_id=self.request.request_id, reason=gone)

    def _log_taken(self, scope: Scope) -> None:
        ids = {"request_id": self.request.request_id, "http_id": request_id_of(scope)}
        _log.info("request_taken", **ids, prompts=len(self.request.prompts), n=self.request.params.n)

    async def _answer_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        output = self._output(scope)
        most = self.front.config.options.max_answer_bytes
        gathered = Gathered(self.shape, most, token_ids=self.asked.token_ids)
        async with aclosing(output.pieces(self.front.dispatcher)) as made:
            async for piece in made:
                gathered.take(piece, prompt_report(output, piece.index // self.asked.n))
        prompts = [prompt_report(output, prompt) for prompt in range(len(self.request.prompts))]
        timing = served.server_timing(output.served)
        headers = {"server-timing": timing} if timing else {}
        answer = self.shape.whole(gathered.choices(), prompts, self._usage(output))
        response = json_response(answer, 200, headers)
        await response(scope, receive, send)

    async def _answer_stream(self, scope: Scope, send: Send) -> None:
        """An error before the first event is an HTTP status; after it, an event that ends the stream without [DONE]."""
        writer = EventWriter(send, scope["state"].get("exchange"))
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
        """Measure times from the request's arrival: reading, rendering and tokenising count as waiting."""
        arrived_s = scope["state"]["arrived_s"]
        observer = self.front.observer_of(scope["headers"])
        return TextStream(self.request, self.text, self.front.tokens, observer, started_s=arrived_s)

    async def _write_pieces(self, writer: EventWriter, output: TextStream) -> None:
        outlet, interval_s = _EventOutlet(self, writer, output), self.front.config.options.sse_keep_alive_interval
        async with aclosing(output.pieces(self.front.dispatcher, outlet)) as made:
            if interval_s is None:
                async for piece in made:
                    await writer.write(outlet.events_of(piece))
            else:
                await self._write_with_comments(writer, outlet, with_quiet(made, interval_s, outlet.written_s))
        if self.asked.usage:
            last = self.shape.usage_chunk(self._usage(output)) | {
                "pdserve": served.report(output.served, instances=self.asked.instances)
            }
            await writer.write(event(last))
        await writer.write(DONE)
        await writer.end()

    async def _write_with_comments(
        self, writer: EventWriter, outlet: "_EventOutlet", pieces: AsyncGenerator[TextPiece | None, None]
    ) -> None:
        async with aclosing(pieces):
            async for piece in pieces:
                await writer.write(outlet.comment() if piece is None else outlet.events_of(piece))

    def _usage(self, output: TextStream) -> dict[str, Any]:
        return served.usage(output, details=self.front.config.options.enable_prompt_tokens_details)


class _EventOutlet:
    """The pieces of one stream as events; a piece is written at once if the writer is idle. Implements Outlet."""

    def __init__(self, generation: Generation, writer: EventWriter, output: TextStream) -> None:
        self._shape, self._asked, self._writer, self._output = generation.shape, generation.asked, writer, output
        self._is_open = False
        self._clock = asyncio.get_running_loop().time
        self._written_s = self._clock()

    def written_s(self) -> float:
        """Return when something was last written, by the loop's clock."""
        return self._written_s

    def comment(self) -> bytes:
        """Return an SSE comment. It may be the first write of the response; later errors are then sent as events."""
        self._written_s = self._clock()
        return COMMENT

    @property
    def is_free(self) -> bool:
        """Whether a piece may be written without waiting."""
        return self._writer.is_free

    def put(self, piece: TextPiece) -> None:
        """Write a piece."""
        self._writer.write_now(self.events_of(piece))

    def events_of(self, piece: TextPiece) -> bytes:
        """Return the event of a piece; the first is preceded by the opening events of all choices."""
        self._written_s = self._clock()
        prompt = prompt_report(self._output, piece.index // self._asked.n)
        usage = served.usage(self._output) if self._asked.continuous_usage else None
        content = self._shape.event(piece, prompt, usage)
        if self._is_open:
            return content
        self._is_open = True
        start = served.usage_at_start(self._output) if self._asked.continuous_usage else None
        return b"".join(self._shape.opening(index, prompt, start) for index in range(self._asked.n)) + content
