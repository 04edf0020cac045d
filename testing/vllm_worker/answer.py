"""Send the answer to one completion, whole or as a stream, with the fault injected into it."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from aiohttp import web

from testing.vllm_worker.answer_body import AnswerBody, FakeChoice, event
from testing.vllm_worker.chat_answer import ChatAnswer
from testing.vllm_worker.faults import ENDLESS, FAILED, Fault, Faults
from testing.vllm_worker.generation import FakeGeneration
from testing.vllm_worker.push import LoadFailed
from testing.vllm_worker.rank import WorkerRank
from testing.vllm_worker.request import FakeBody

DONE = b"data: [DONE]\n\n"


class _Met(Exception):
    """The point of the request's fault is reached."""


@dataclass(slots=True)
class FakeAnswer:
    """One unfinished answer. `generations` are those of its prompts, in order."""

    request: web.Request
    rank: WorkerRank
    body: FakeBody
    form: AnswerBody | ChatAnswer
    generations: list[FakeGeneration]
    faults: Faults
    fault: Fault | None = None
    tokens_per_chunk: int = 1
    num_tokens: int = 0
    finished: list[str] = field(default_factory=list)

    async def send(self) -> web.StreamResponse:
        """Return the response, complete unless a fault prevents that."""
        answer = await (self._stream() if self.body.stream else self._whole())
        reasons = self.rank.counts.requests  # an aborted request is in none of vLLM's counts
        for reason in self.finished or ["error"]:
            reasons[reason] = reasons.get(reason, 0) + 1
        return answer

    async def _whole(self) -> web.StreamResponse:
        choices: dict[int, FakeChoice] = {}
        try:
            async with aclosing(self._pieces()) as pieces:
                async for piece in pieces:
                    _join(choices, piece)
        except LoadFailed:
            return web.json_response(FAILED, status=500)
        except _Met:
            assert self.fault is not None, "its point was reached"
            return await self.faults.meet(self.fault, self.request)
        rows = [choices[index] for index in sorted(choices)]
        transfer = self.generations[0].transfer
        return web.json_response(self.form.whole(rows, self.form.usage(self.num_tokens, self._cached), transfer))

    async def _stream(self) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(self.request)
        waiting: dict[int, FakeChoice] = {}
        try:
            async with aclosing(self._pieces()) as pieces:
                async for piece in pieces:
                    _join(waiting, piece)
                    is_full = len(waiting[piece.index].token_ids) >= self.tokens_per_chunk
                    if is_full or piece.prompt is not None or piece.finish_reason is not None:
                        await response.write(self.form.chunk(waiting.pop(piece.index)))
            if self.body.include_usage:
                await response.write(self.form.last_chunk(self.form.usage(self.num_tokens, self._cached)))
            await response.write(DONE)
        except LoadFailed:
            await response.write(event(FAILED) + DONE)
        except _Met:
            assert self.fault is not None, "its point was reached"
            await self.faults.meet(self.fault, self.request)
            if self.fault.action == "error":
                await response.write(event(FAILED) + DONE)
            elif self.fault.action == "recompute":
                given_up = FakeChoice(0, finish_reason="stop", stop_reason="recomputed")
                await response.write(self.form.chunk(given_up) + DONE)
        await response.write_eof()
        return response

    async def _pieces(self) -> AsyncGenerator[FakeChoice, None]:
        """Yield the pieces of all prompts. Raises LoadFailed, or _Met at the fault's point."""
        for number, generation in enumerate(self.generations):
            async with aclosing(generation.pieces()) as steps:
                async for step in steps:
                    for piece in step:
                        await self._check("during")
                        self.num_tokens += 1
                        piece.index += number * self.body.params.n
                        if piece.finish_reason is not None:
                            self.finished.append(piece.finish_reason)
                        yield piece
        await self._check("after")

    async def _check(self, point: str) -> None:
        fault = self.fault
        if fault is not None and fault.point == point and self.num_tokens >= fault.after_tokens:
            if fault.action in ENDLESS:  # meanwhile the prompt keeps its batch slot and its blocks
                await self.faults.meet(fault, self.request)
            raise _Met

    @property
    def _cached(self) -> int:
        return sum(one.cached_tokens for one in self.generations)


def _join(choices: dict[int, FakeChoice], piece: FakeChoice) -> None:
    whole = choices.setdefault(piece.index, piece)
    if whole is not piece:
        whole.token_ids += piece.token_ids
        whole.logprobs += piece.logprobs
        whole.finish_reason, whole.stop_reason = piece.finish_reason, piece.stop_reason
