"""A dispatcher without a cluster: it replays a script, so that the HTTP API can be tested alone."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from scheduler.request import (
    GenerationRequest,
    NewToken,
    PathEvent,
    PromptDone,
    PromptScored,
    RunningRequest,
    Vector,
)
from testing.wire.fake_prompt import fake_vector
from wire.errors import Overloaded, PdserveError
from wire.types import FinishReason, SamplingParams, StageTimes, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Line:
    """The output of one sequence. With `stop_token_id` it finishes by that token, else by length."""

    token_ids: Sequence[int]
    stop_token_id: int | None = None


Script = Callable[[GenerationRequest, int, int], Line]
"""From (request, prompt, sequence) to its output."""

TIMES = StageTimes(
    queue_s=0.001, reserve_s=0.002, prefill_s=0.1, send_s=0.01, first_step_s=0.02, kv_bytes=4096, transport="shm"
)


@dataclass(slots=True)
class ScriptedDispatcher:
    """Replays `script`; the sequences of a request take turns token by token.

    After `hold_after` tokens of a request it sets `held` and waits for `released`; after `fail_after` it raises
    `error`; `refuse_with` is raised at once; `last_finish` replaces the finish reasons. It records requests, stopped
    sequences and each request's outcome.
    """

    script: Script
    hold_after: int | None = None
    fail_after: int | None = None
    error: PdserveError | None = None
    refuse_with: PdserveError | None = None
    last_finish: FinishReason | None = None
    requests: list[GenerationRequest] = field(default_factory=list)
    stopped: list[tuple[int, int]] = field(default_factory=list)
    endings: list[str] = field(default_factory=list)
    held: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    def check_room(self, tenant: str) -> None:
        """Raise `refuse_with` if it is Overloaded."""
        if isinstance(self.refuse_with, Overloaded):
            raise self.refuse_with

    def start(self, request: GenerationRequest) -> RunningRequest:
        """Start a request."""
        if self.refuse_with is not None:
            raise self.refuse_with
        self.requests.append(request)
        return _Playing(self, request)


class _Playing:
    """One request being replayed."""

    def __init__(self, dispatcher: ScriptedDispatcher, request: GenerationRequest) -> None:
        self._dispatcher = dispatcher
        self._request = request
        self._stopped: set[tuple[int, int]] = set()

    async def events(self) -> AsyncIterator[PathEvent]:
        """Yield the script's events."""
        ending = "cancelled"
        try:
            for scores in self._scores():
                yield scores
            events: Sequence[NewToken | Vector] = self._vectors() or self._turns()
            for played, event in enumerate(events):
                await self._pause(played)
                if played == self._dispatcher.fail_after and self._dispatcher.error is not None:
                    ending = "failed"
                    raise self._dispatcher.error
                yield self._cut(event) if isinstance(event, NewToken) else event
            for prompt in range(len(self._request.prompts)):
                yield PromptDone(prompt, "handoff", "least loaded", "prefill-0", "decode-0", TIMES)
            ending = "finished"
        finally:
            self._dispatcher.endings.append(ending)
            self._dispatcher.closed.set()

    def divert(self, taker: Callable[[NewToken], bool]) -> None:
        """Ignore the taker: all events are read."""

    def stop_sequence(self, prompt: int, sequence: int) -> None:
        """Stop one sequence from here."""
        self._stopped.add((prompt, sequence))
        self._dispatcher.stopped.append((prompt, sequence))

    async def _pause(self, played: int) -> None:
        if played == self._dispatcher.hold_after:
            self._dispatcher.held.set()
            await self._dispatcher.released.wait()
        await asyncio.sleep(0)

    def _turns(self) -> list[NewToken]:
        params, prompts = self._request.params, range(len(self._request.prompts))
        lines = {
            (prompt, sequence): self._dispatcher.script(self._request, prompt, sequence)
            for prompt in prompts
            for sequence in range(params.num_sequences)
        }
        events = [event for key, line in lines.items() for event in _events(key, line, params)]
        return sorted(events, key=lambda event: event.index)

    def _vectors(self) -> list[Vector]:
        prompts = self._request.prompts if self._request.poolings else ()
        return [Vector(prompt, fake_vector(token_ids)) for prompt, token_ids in enumerate(prompts)]

    def _scores(self) -> list[PromptScored]:
        count = self._request.params.prompt_logprobs
        if count is None:
            return []
        return [
            PromptScored(prompt, 0, (None, *(scores_of(token_id, count) for token_id in token_ids[1:])))
            for prompt, token_ids in enumerate(self._request.prompts)
        ]

    def _cut(self, event: NewToken) -> NewToken:
        """Return the event, of a stopped sequence only its finish."""
        if event.finish is not None and self._dispatcher.last_finish is not None:
            return NewToken(event.prompt, event.sequence, event.index, None, self._dispatcher.last_finish)
        if (event.prompt, event.sequence) not in self._stopped:
            return event
        finish = event.finish and FinishReason.STOP
        return NewToken(event.prompt, event.sequence, event.index, None, finish)


def scores_of(token_id: int, wanted: int | tuple[int, ...]) -> TokenLogprobs:
    """Return the scripted log probabilities of a token: minus its id / 100; the most likely are those from id 1 on."""
    best = tuple(range(1, wanted + 1)) if isinstance(wanted, int) else wanted
    return TokenLogprobs(-token_id / 100, token_id, best, tuple(-other / 100 for other in best))


def _events(key: tuple[int, int], line: Line, params: SamplingParams) -> list[NewToken]:
    max_tokens = params.max_tokens
    ids = list(line.token_ids)
    if line.stop_token_id is not None:
        ids.append(line.stop_token_id)
    stops = line.stop_token_id is not None and len(ids) <= max_tokens
    ids = ids[:max_tokens]
    scores = [None if params.logprobs is None else scores_of(token_id, params.wanted_logprobs) for token_id in ids]
    *first, last = [NewToken(*key, index, token_id, logprobs=scores[index]) for index, token_id in enumerate(ids)]
    finish = FinishReason.STOP if stops else FinishReason.LENGTH
    stop_token_id = line.stop_token_id if stops else None
    return [*first, dataclasses.replace(last, finish=finish, stop_token_id=stop_token_id)]
