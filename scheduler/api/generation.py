"""Run one request and answer it, as a whole or as a stream; an `AnswerShape` formats the answer."""

import asyncio
from functools import partial
from typing import Any

from starlette.types import Receive, Scope, Send

from scheduler.api.answer_options import AnswerOptions
from scheduler.api.answer_shape import AnswerShape, prompt_reports
from scheduler.api.choice_collector import ChoiceCollector
from scheduler.api.errors import error_body, json_response, request_id_of
from scheduler.api.piece_writer import PieceWriter
from scheduler.api.resumed import CopiedEvents, Resumed, ResumedObserver, SkippedEvents
from scheduler.api.sse import ClientGone, until_disconnect
from scheduler.api.usage import served_headers, serving_report, timing_metrics, token_usage
from scheduler.app_context import AppContext
from scheduler.request import GenerationRequest
from scheduler.request_claims import RequestClaim
from scheduler.text.pieces import TextOptions
from scheduler.text_output import Dispatch, TextOutput
from telemetry.logs import EventLogger
from wire.cheap_dataclass import cheap_dataclass
from wire.errors import Draining, StreamMoved
from wire.messages import RunEnd

_log = EventLogger("api")


@cheap_dataclass(frozen=True, slots=True)
class Generation:
    """An ASGI response that runs `request` when called, and cancels it when the client disconnects.

    A stream that is kept is cancelled only if no client has resumed it within --orphan-limit. With a `claim` its answer
    is kept too.
    """

    context: AppContext
    request: GenerationRequest
    text: TextOptions
    shape: AnswerShape
    options: AnswerOptions
    resumed: Resumed | None = None
    claim: RequestClaim | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises a PdserveError only before anything was sent."""
        kept_s = 0.0 if self.request.stream is None else self.context.config.options.orphan_limit
        with self.context.drain:
            _log.info(
                "request_accepted", request_id=self.request.request_id, http_id=request_id_of(scope),
                prompts=len(self.request.prompts), n=self.request.params.n,
            )  # fmt: skip
            run = self._answer_stream(scope) if self.options.stream else self._answer_whole(scope, receive, send)
            try:
                await until_disconnect(receive, run, kept_s, partial(self._report_end, RunEnd.LEFT))
            except ClientGone as gone:
                _log.info("client_gone", request_id=self.request.request_id, reason=gone)

    async def _answer_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        output = self._text_output(scope)
        limit = self.context.config.options.max_answer_bytes
        collector = ChoiceCollector(self.shape, self.options, prompt_reports(output), limit)
        await output.run(self.context.dispatcher.run if self.resumed is None else self.resumed.run, collector.add)
        answer = self.shape.whole(collector.choices(), prompt_reports(output), self._usage_of(output))
        if "metrics" in answer:
            answer["metrics"] = self._metrics_of(output)
        response = json_response(answer, 200, served_headers(output.served))
        if self.claim is not None:
            await self.claim.finish(bytes(response.body))
        await response(scope, receive, send)

    async def _answer_stream(self, scope: Scope) -> None:
        """An error before the first event is an HTTP status; after it, an event that ends the stream without [DONE]."""
        output = self._text_output(scope)
        answer = scope["state"]["answer"]
        run: Dispatch = self.context.dispatcher.run
        if self.resumed is not None:
            answer, run = SkippedEvents(answer, self.resumed.after), self.resumed.run
        copied = None
        if self.claim is not None:
            answer = copied = CopiedEvents(answer)
        writer = PieceWriter(self.shape, self.options, output, answer)
        try:
            with writer.comments(self.context.config.options.sse_keep_alive_interval):
                await output.run(run, writer.put)
            await writer.end(self._usage_chunk(output))
            if self.claim is not None and copied is not None:
                await self.claim.finish(bytes(copied.content))
        except asyncio.CancelledError:
            if writer.started and self.context.drain.draining:
                await writer.fail(error_body(Draining("the server is shutting down"), scope))
            raise
        except Exception as error:
            if isinstance(error, StreamMoved):
                self._report_end(RunEnd.MOVED)
            if not writer.started:
                raise
            await writer.fail(error_body(error, scope))

    def _report_end(self, end: RunEnd) -> None:
        if self.claim is not None:
            self.claim.end(end)

    def _text_output(self, scope: Scope) -> TextOutput:
        """Measure times from the request's arrival: reading, rendering and tokenising count as waiting."""
        arrived_s = scope["state"]["arrived_s"]
        observer = self.context.observer_of(scope["headers"])
        if self.resumed is not None:
            observer = ResumedObserver(observer, self.resumed.num_counted)
        return TextOutput(self.request, self.text, self.context.tokens, observer, started_s=arrived_s)

    def _usage_chunk(self, output: TextOutput) -> dict[str, Any] | None:
        chunk = self.shape.usage_chunk(self._usage_of(output)) if self.options.usage else None
        if chunk is not None:
            chunk["pdserve"] = serving_report(output.served, instances=self.options.instances)
            if "choices" in chunk and (metrics := self._metrics_of(output)):
                chunk["metrics"] = {name: value for name, value in metrics.items() if value is not None}
        return chunk

    def _metrics_of(self, output: TextOutput) -> dict[str, float | None] | None:
        """Return the times of a request with one choice; None for several, or if they are not reported."""
        is_one = self.options.n == len(self.request.prompts) == 1
        enabled = self.context.config.options.enable_per_request_metrics
        return timing_metrics(output.request_done()) if enabled and is_one else None

    def _usage_of(self, output: TextOutput) -> dict[str, Any]:
        return token_usage(output, details=self.options.cached_tokens)
