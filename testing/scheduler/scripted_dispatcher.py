"""A dispatcher without a cluster: it replays a script, so that the HTTP API can be tested alone."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scheduler.request import GenerationRequest, PromptDone, TokenSink
from scheduler.request_class import UNCLASSED, RequestClass
from simulation.prompt import simulated_vector
from wire.errors import Overloaded, PdserveError
from wire.types import FinishReason, SamplingParams, StageTimes, TokenLogprobs, TokenOutput


@dataclass(frozen=True, slots=True)
class Line:
    """The output of one sequence. With `stop_token_id` it finishes by that token, else by length."""

    token_ids: Sequence[int]
    stop_token_id: int | None = None


Script = Callable[[GenerationRequest, int, int], Line]
"""Maps (request, prompt, sequence) to the output of that sequence."""

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
    outcomes: list[str] = field(default_factory=list)
    held: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    def check_room(self, tenant: str, request_class: RequestClass = UNCLASSED) -> None:
        """Raise `refuse_with` if it is Overloaded."""
        if isinstance(self.refuse_with, Overloaded):
            raise self.refuse_with

    async def run(self, request: GenerationRequest, sink: TokenSink) -> None:
        """Replay the script for a request."""
        if self.refuse_with is not None:
            raise self.refuse_with
        self.requests.append(request)
        outcome = "cancelled"
        try:
            await _Playing(self, request, sink).play()
            outcome = "finished"
        except PdserveError:
            outcome = "failed"
            raise
        finally:
            self.outcomes.append(outcome)
            self.closed.set()


class _Playing:
    """One request being replayed."""

    def __init__(self, dispatcher: ScriptedDispatcher, request: GenerationRequest, sink: TokenSink) -> None:
        self._dispatcher = dispatcher
        self._request = request
        self._sink = sink
        self._ended: set[tuple[int, int]] = set()

    async def play(self) -> None:
        """Pass the script to the sink."""
        prompts = range(len(self._request.prompts))
        params = self._request.params
        for prompt, token_ids in enumerate(self._request.prompts if params.prompt_logprobs is not None else ()):
            wanted = (params.wanted_at(at, len(token_ids)) for at in range(1, len(token_ids)))
            self._sink.prompt_logprobs(prompt, (None, *map(scores_of, token_ids[1:], wanted)))
        for played, (prompt, token) in enumerate(self._scripted_tokens()):
            await self._pause_if_held(played)
            self._emit(prompt, token)
        for prompt in prompts if self._request.poolings else ():
            await self._pause_if_held(prompt)
            self._sink.vector(prompt, simulated_vector(self._request.prompts[prompt]))
        for prompt in prompts:
            self._sink.prompt_done(PromptDone(prompt, "handoff", "least loaded", "prefill-0", "decode-0", TIMES))

    def _emit(self, prompt_index: int, token: TokenOutput) -> None:
        key, last_finish = (prompt_index, token.sequence), self._dispatcher.last_finish
        if token.finish is not None and last_finish is not None:
            token = TokenOutput(token.prompt_id, token.sequence, token.index, None, last_finish)
        if key not in self._ended and not self._sink.emit(prompt_index, token):
            self._ended.add(key)
            if token.finish is None:
                self._dispatcher.stopped.append(key)

    async def _pause_if_held(self, played: int) -> None:
        if played == self._dispatcher.hold_after:
            self._dispatcher.held.set()
            await self._dispatcher.released.wait()
        await asyncio.sleep(0)
        if played == self._dispatcher.fail_after and self._dispatcher.error is not None:
            raise self._dispatcher.error

    def _scripted_tokens(self) -> list[tuple[int, TokenOutput]]:
        if self._request.poolings:
            return []
        params = self._request.params
        turns = [
            (prompt, token)
            for prompt in range(len(self._request.prompts))
            for sequence in range(params.num_sequences)
            for token in _tokens(sequence, self._dispatcher.script(self._request, prompt, sequence), params)
        ]
        return sorted(turns, key=lambda turn: turn[1].index)


def scores_of(token_id: int, wanted: int | tuple[int, ...]) -> TokenLogprobs:
    """Return the scripted log probabilities of a token: minus its id / 100; the most likely are those from id 1 on."""
    best = tuple(range(1, wanted + 1)) if isinstance(wanted, int) else wanted
    return TokenLogprobs(-token_id / 100, token_id, best, tuple(-other / 100 for other in best))


def _tokens(sequence: int, line: Line, params: SamplingParams) -> list[TokenOutput]:
    max_tokens = params.max_tokens
    ids = list(line.token_ids)
    if line.stop_token_id is not None:
        ids.append(line.stop_token_id)
    stops = line.stop_token_id is not None and len(ids) <= max_tokens
    ids = ids[:max_tokens]
    scores = [None if params.logprobs is None else scores_of(token_id, params.wanted_logprobs) for token_id in ids]
    tokens = [TokenOutput("", sequence, index, token_id, logprobs=scores[index]) for index, token_id in enumerate(ids)]
    tokens[-1].finish = FinishReason.STOP if stops else FinishReason.LENGTH
    tokens[-1].stop_token_id = line.stop_token_id if stops else None
    return tokens
