"""One running prompt: its identity, output, limits and received events."""

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from scheduler.inbox import Arrival, Inbox, PromptStep, Stopped, Work
from scheduler.instances import Instance
from scheduler.load.loads import PromptFacts
from scheduler.load.prefixes import Chain, chain_of
from scheduler.ordering import OrderedOutput, OrderedScores
from scheduler.queue.waiting import Waiting
from scheduler.request import GenerationRequest, NewToken, PathEvent, PromptScored, Vector
from wire.errors import DeadlineExceeded
from wire.types import PromptState, StageTimes

_TIMES = tuple((field.name, field.default) for field in dataclasses.fields(StageTimes))


class AllEnded(Exception):
    """The client ended all sequences of a prompt that is waiting for its retry."""


class PromptRun:
    """Owner of a prompt's output, limits and inbox.

    A retry is a new attempt: new id, new inbox, the same output. It continues from the tokens already sent.
    """

    def __init__(
        self, request: GenerationRequest, prompt: int, new_id: Callable[[], str], emit: Callable[[PathEvent], None]
    ) -> None:
        self.request = request
        self.prompt = prompt
        self.output = OrderedOutput(request.params.num_sequences)
        self._scores = OrderedScores()
        self._chain = self._chain_with(())
        self._searches = False
        self._times: dict[str, Any] = {}
        self.avoid: frozenset[tuple[int | None, int]] = frozenset()
        self._new_id = new_id
        self._emit = emit
        self._started_at = asyncio.get_running_loop().time()
        self._stage_at = self._started_at
        self._works: list[Work] = []
        self._give_up: Callable[[], object] | None = None
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Start a new attempt from the queue."""
        self.output.forget_early()
        self.state = PromptState(
            self._new_id(), self.request.request_id, self.request.prompts[self.prompt],
            self.request.params_of(self.prompt), self.output.so_far, self.request.probe,
            cache_salt=self.request.cache_salt,
            pooling=self.request.poolings[self.prompt] if self.request.poolings else None,
        )  # fmt: skip
        self.stage, self._computes = "waiting in the queue", False
        self.inbox = Inbox()

    @property
    def prompt_id(self) -> str:
        """The id of this attempt on instances."""
        return self.state.prompt_id

    @property
    def facts(self) -> PromptFacts:
        """The prompt's properties for placement."""
        params = self.request.params
        pooled = self.state.pooling is not None
        length = len(self.state.token_ids)
        return PromptFacts(length, params.max_tokens, params.width, self.avoid, pooled, self._chain)

    def waiting(self, turn: int = 0) -> Waiting:
        """Return this attempt's place in the queue; `turn` counts the prompts of the request before it."""
        request = self.request
        return Waiting(self.prompt_id, self.facts, turn, tenant=request.tenant, priority=request.priority)

    @property
    def chains(self) -> list[Chain]:
        """The links of the prompt with the output of each sequence."""
        return [self._chain_with(output[:-1]) for output in self.output.so_far]

    @property
    def deadline(self) -> float:
        """When the current wait ends, by the loop's clock: for the first token, later for progress."""
        if self._is_generating:
            return self._stage_at + self.request.stall_timeout_s
        return self._started_at + self.request.first_token_timeout_s

    def deadline_error(self) -> DeadlineExceeded:
        """Return the error for a passed deadline, naming the current stage."""
        if self._is_generating:
            return DeadlineExceeded(f"no progress for {self.request.stall_timeout_s:g} s, {self.stage}")
        return DeadlineExceeded(f"no first token within {self.request.first_token_timeout_s:g} s, {self.stage}")

    def enter(self, stage: str, *, computes: bool = False) -> float:
        """Enter the next stage; return the last one's duration. `computes`: an instance is computing the prompt."""
        now = asyncio.get_running_loop().time()
        seconds, self._stage_at, self.stage = now - self._stage_at, now, stage
        self._computes = computes
        return seconds

    @contextmanager
    def attend(self, instance: Instance) -> Iterator[Work]:
        """Attach to an instance to receive its events; on exit, end the prompt there."""
        with instance.attend(self.prompt_id, self.inbox) as work:
            self._works.append(work)
            try:
                yield work
            finally:
                self._works.remove(work)
                self.inbox.rest()

    async def next_arrival(self) -> Arrival:
        """Return the next arrival. Raises DeadlineExceeded at the deadline.

        A sequence that a full pool preempted waits for blocks on a working instance, and a prompt being recomputed by
        another instance sends nothing until it is done: both get as long as a first token, since the instance's own
        progress is checked separately.
        """
        loop = asyncio.get_running_loop()
        patience = loop.time() + self.request.first_token_timeout_s
        while True:
            try:
                arrival = await self.inbox.get(self.deadline)
            except TimeoutError:
                if loop.time() < self.deadline:  # tokens bypassed the inbox meanwhile
                    patience = self._stage_at + self.request.first_token_timeout_s
                    continue
                if not self._may_wait() or loop.time() >= patience:
                    raise self.deadline_error() from None
                self._stage_at = loop.time()
                continue
            self._stage_at = loop.time()
            return arrival

    @contextmanager
    def wanted(self, give_up: Callable[[], object]) -> Iterator[None]:
        """Wait only while the client needs more of the prompt; else `give_up` cancels the wait.

        Raises AllEnded.
        """
        if self.output.all_ended:
            raise AllEnded
        self._give_up = give_up
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.output.all_ended and task is not None and not task.cancelling():
                raise AllEnded from None
            raise
        finally:
            self._give_up = None

    def _chain_with(self, output: tuple[int, ...]) -> Chain:
        """Return the links of the prompt and `output`; none for requests that bypass the prefix cache."""
        request = self.request
        if request.probe or request.params.prompt_logprobs is not None:
            return ()
        return chain_of((*request.prompts[self.prompt], *output), request.cache_salt)

    @property
    def _is_generating(self) -> bool:
        """Whether tokens arrived, or a beam search, which reports them at its end, made progress."""
        return self.output.started or self._searches

    def _may_wait(self) -> bool:
        """Whether an instance may have a reason for no events beyond the limit of no progress."""
        waits = self._computes or any(work.short_of_blocks() for work in self._works)
        return self._is_generating and waits

    def flow(self, work: Work) -> None:
        """From now on handle steps of `work` that finish nothing as they arrive; `next_arrival` returns all others."""
        self.inbox.taker = partial(self._take_directly, work)

    def _take_directly(self, work: Work, arrival: Arrival) -> bool:
        step = arrival.event
        if arrival.work is not work or not isinstance(step, PromptStep) or step.times is not None:
            return False
        if step.prompt_logprobs or any(token.finish is not None for token in step.tokens):
            return False
        self._stage_at = asyncio.get_running_loop().time()
        self.take(step, work)
        return not self.output.all_ended  # else wake the reader; taking the step again has no effect

    def take(self, step: PromptStep, work: Work) -> None:
        """Emit the tokens of a step that can be released; cancel sequences stopped meanwhile on the instance."""
        for part in step.prompt_logprobs:
            if (new := self._scores.add(part)) is not None:
                self._emit(PromptScored(self.prompt, new.start, new.tokens))
        for token in step.tokens:
            if self.output.is_stopped(token.sequence) and token.finish is None:
                work.cancel_sequence(token.sequence)
            for ready in self.output.add(token):
                self._emit(
                    NewToken(
                        self.prompt, ready.sequence, ready.index, ready.token_id, ready.finish, ready.stop_token_id,
                        ready.logprobs,
                    )
                )  # fmt: skip
        if step.times is not None:
            self.add_times(step.times)
            self._searches |= not step.tokens and self.request.params.beam_search is not None

    def answer(self, values: tuple[float, ...]) -> None:
        """Emit the vector of a prompt with pooling."""
        self._emit(Vector(self.prompt, values))

    def add_times(self, more: StageTimes) -> None:
        """Add the durations set in `more`."""
        self._times |= {name: value for name, default in _TIMES if (value := getattr(more, name)) != default}

    @property
    def times(self) -> StageTimes:
        """The known durations; the last report of each counts."""
        return StageTimes(**self._times)

    def stop(self, sequence: int) -> None:
        """Stop a sequence on all instances."""
        if self.output.stop(sequence):
            for work in self._works:
                work.cancel_sequence(sequence)
            self.inbox.put_nowait(Arrival(None, Stopped()))
            if self._give_up is not None and self.output.all_ended:
                self._give_up()
