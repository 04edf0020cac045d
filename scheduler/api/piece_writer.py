"""Write the pieces of one streamed answer to the client as they are made."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from scheduler.api.answer_options import AnswerOptions
from scheduler.api.answer_shape import AnswerShape, PromptReport, prompt_reports
from scheduler.api.answer_writer import AnswerWriter
from scheduler.api.usage import token_usage, usage_at_start
from scheduler.text.pieces import TextPiece
from scheduler.text_output import TextOutput


class PieceWriter:
    """Formats pieces; the first is preceded by the response headers and the opening events of all choices.

    The last piece of a choice waits two turns of the event loop: usually the answer ends meanwhile, and one write
    carries both the piece and the end.
    """

    def __init__(self, shape: AnswerShape, options: AnswerOptions, output: TextOutput, answer: AnswerWriter) -> None:
        self.started = False
        self._shape, self._options, self._output, self._answer = shape, options, output, answer
        self._prompts: list[PromptReport] = []
        self._is_open = False
        self._held = b""
        self._clock = asyncio.get_running_loop().time
        self._written_s = self._clock()
        self._comment_timer: asyncio.TimerHandle | None = None

    def put(self, piece: TextPiece) -> None:
        """Write a piece."""
        if not self._is_open:
            self._prompts = prompt_reports(self._output)
        prompt = self._prompts[piece.index // self._options.n]
        usage = token_usage(self._output) if self._options.continuous_usage else None
        content = self._shape.event(piece, prompt, usage)
        if not self._is_open:
            self._is_open = True
            start = usage_at_start(self._output) if self._options.continuous_usage else None
            opening = b"".join(self._shape.opening(index, prompt, start) for index in range(self._options.n))
            content = opening + content
        if piece.finish_reason is not None:
            self._start()
            self._held += content
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._write_held)
        elif self.started and not self._held:
            self._written_s = self._clock()
            self._answer.write(content)  # not through `write`: fewer calls for each token
        else:
            self.write(content)

    def write(self, content: bytes) -> None:
        """Write a part of the answer, preceded by the response headers if it is the first."""
        self._start()
        self._written_s = self._clock()
        self._answer.write(self._take_held() + content)

    async def fail(self, body: Mapping[str, Any]) -> None:
        """Write an error as the last object, and end the answer."""
        self._start()
        await self._answer.end(self._take_held() + self._shape.stream_format.frame(body))

    async def end(self, usage_chunk: Mapping[str, Any] | None) -> None:
        """Write the usage chunk, if there is one, then the end mark, and end the answer."""
        stream_format = self._shape.stream_format
        self._start()
        usage = b"" if usage_chunk is None else stream_format.frame(usage_chunk)
        await self._answer.end(self._take_held() + usage + stream_format.end)

    def _write_held(self) -> None:
        if self._held:
            self.write(b"")

    def _take_held(self) -> bytes:
        held, self._held = self._held, b""
        return held

    def _start(self) -> None:
        """Start the answer, unless it has started."""
        if not self.started:
            self.started = True
            self._answer.start(200, self._shape.stream_format.headers)

    @contextmanager
    def comments(self, interval_s: float | None) -> Iterator[None]:
        """Write a comment when nothing was written for `interval_s`, so that no proxy closes the stream; None: never.

        If a comment is the first write of the response, later errors are sent as events.
        """
        if interval_s is not None and self._shape.stream_format.comment:
            self._set_comment_timer(interval_s)
        try:
            yield
        finally:
            if self._comment_timer is not None:
                self._comment_timer.cancel()
                self._comment_timer = None

    def _set_comment_timer(self, interval_s: float) -> None:
        due_s, loop = self._written_s + interval_s, asyncio.get_running_loop()
        self._comment_timer = loop.call_at(due_s, self._write_comment, interval_s)

    def _write_comment(self, interval_s: float) -> None:
        if self._clock() >= self._written_s + interval_s:
            self.write(self._shape.stream_format.comment)
        self._set_comment_timer(interval_s)
