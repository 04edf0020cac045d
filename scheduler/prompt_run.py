"""One running prompt: its place in the queue, output, limits and unread events."""

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

from scheduler.instances import Instance
from scheduler.load.loads import PromptFacts
from scheduler.load.prefixes import DIGEST_TOKENS, Chain, chain_of
from scheduler.ordering import OrderedOutput, OrderedScores
from scheduler.prompt_on_instance import PromptEvent, PromptOnInstance, PromptStep
from scheduler.queue.queue_entry import QueueEntry
from scheduler.request import GenerationRequest, TokenSink
from scheduler.wakeup import Wakeup
from wire.errors import DeadlineExceeded, InvalidRequest
from wire.messages import HandedOff, Pooled
from wire.types import PromptState, StageTimes, TokenOutput

_TIMES = tuple((field.name, field.default) for field in dataclasses.fields(StageTimes))


class SinkFailed(Exception):
    """The request's sink raised `error`: the request has failed, and no other attempt would help."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class PromptRun:
    """Owner of one prompt. Implements scheduler.prompt_on_instance.PromptOwner.

    Tokens are emitted to the request's sink as they arrive; all other events wait in `next_event` for the path. A retry
    is a new attempt: new id, new place in the queue, the same output. It continues from the tokens already sent.
    `decoded_on` is the index and the process epoch of the instance that sent tokens of its stream, if it has a stream.
    """

    def __init__(self, request: GenerationRequest, index: int, sink: TokenSink, new_id: Callable[[], str]) -> None:
        self.request = request
        self.index = index
        self.output = OrderedOutput(request.params.num_sequences)
        self.avoid: frozenset[tuple[int | None, int]] = frozenset()
        self._sink = sink
        self._new_id = new_id
        self._scores = OrderedScores()
        self._chain = self._chain_with(())
        self._searches = False
        self._times: dict[str, Any] = {}
        self._knows_cached = False
        self._clock = asyncio.get_running_loop().time
        self._started_at = self._active_at = self._clock()
        self._on_instances: list[PromptOnInstance] = []
        self._events: deque[tuple[PromptOnInstance, PromptEvent]] = deque()
        self._failure: Exception | None = None
        self._stream = request.stream
        self._wakeup = Wakeup()
        self._start_attempt(turn=index)

    def requeue(self) -> QueueEntry:
        """Start another attempt, and return its place in the queue; it keeps the count of prompts that overtook it."""
        self.output.forget_early()
        self._events.clear()
        self._knows_cached |= "prefill_s" in self._times
        self._failure, num_overtaken = None, self.queue_entry.num_overtaken
        if self._stream is not None:
            self._stream = dataclasses.replace(self._stream, owner_epoch=self._stream.owner_epoch + 1)
        self._start_attempt(turn=0)
        self.queue_entry.num_overtaken = num_overtaken
        return self.queue_entry

    def _start_attempt(self, *, turn: int) -> None:
        request, index = self.request, self.index
        self.state = PromptState(
            self._new_id(), request.request_id, request.prompts[index], request.params_of(index), self.output.so_far,
            request.probe, cache_salt=request.cache_salt,
            pooling=request.poolings[index] if request.poolings else None, traceparent=request.traceparent,
            images=request.images_of(index), chat=request.chat,
            gap_limit_s=request.request_class.gap_limit_s or 0.0, stream=self._stream,
        )  # fmt: skip
        self.decoded_on: tuple[int, int] | None = None
        self._holds, self._held = True, list[TokenOutput]()
        self.stage, self._computes = "waiting in the queue", False
        self.queue_entry = QueueEntry(
            self.prompt_id, self.facts, turn, tenant=request.tenant, priority=request.priority
        )

    def adopt(self, state: PromptState) -> None:
        """Continue the attempt that an instance keeps."""
        self.state, self._stream, self._failure = state, state.stream, None
        self._events.clear()

    @property
    def prompt_id(self) -> str:
        """The id of this attempt on instances."""
        return self.state.prompt_id

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of its outputs so far."""
        return len(self.request.prompts[self.index]) + self.output.num_tokens

    @property
    def facts(self) -> PromptFacts:
        """The prompt's properties for placement."""
        params = self.request.params
        pooled = self.state.pooling is not None
        length = len(self.state.token_ids)
        return PromptFacts(
            length, params.max_tokens, params.width, self.avoid, pooled, self._chain, has_images=bool(self.state.images)
        )

    @property
    def chains(self) -> list[Chain]:
        """The chains of the prompt with the output of each sequence."""
        return [self._chain_with(output[:-1]) for output in self.output.so_far]

    @property
    def times(self) -> StageTimes:
        """The known durations, each as last reported; the counts of cached tokens are the first attempt's."""
        return StageTimes(**self._times)

    @property
    def deadline(self) -> float:
        """When the current wait ends, by the loop's clock: for the first token, later for progress."""
        if self._is_generating:
            return self._active_at + self.request.stall_timeout_s
        return self._started_at + self.request.first_token_timeout_s

    def deadline_error(self) -> DeadlineExceeded:
        """Return the error for a passed deadline, naming the current stage."""
        if self._is_generating:
            return DeadlineExceeded(f"no progress for {self.request.stall_timeout_s:g} s, {self.stage}")
        return DeadlineExceeded(f"no first token within {self.request.first_token_timeout_s:g} s, {self.stage}")

    def enter(self, stage: str, *, computes: bool = False) -> float:
        """Enter the next stage; return the last one's duration. `computes`: an instance is computing the prompt."""
        now = self._clock()
        seconds, self._active_at, self.stage = now - self._active_at, now, stage
        self._computes = computes
        return seconds

    def add_time(self, name: str, seconds: float) -> None:
        """Add one duration, by its name in StageTimes."""
        self._times[name] = seconds

    def add_times(self, more: StageTimes) -> None:
        """Add the durations set in `more`."""
        known = {"cached_tokens", "written_tokens"} if self._knows_cached else ()
        self._times |= {
            name: value for name, default in _TIMES if (value := getattr(more, name)) != default and name not in known
        }

    def open_on(
        self, instance: Instance, on_start: Callable[[], None] = lambda: None, *, generates: bool = True
    ) -> PromptOnInstance:
        """Receive an instance's events; leaving the result's `with` block ends the prompt on the instance.

        `on_start` is called before the first token. Raises InvalidRequest if the instance would not see the images.
        """
        if self.state.chat is not None and not self.state.images and instance.description.worker is None:
            raise InvalidRequest(f"the prompt has an image, but {instance} takes text only", "messages")

        stream = self._stream if generates else None

        def close(on_instance: PromptOnInstance) -> None:
            self._on_instances.remove(on_instance)
            self._wakeup.stop_timer()
            if stream is not None:
                self._leave_stream(on_instance, instance)
            instance.detach(on_instance)

        on_instance = PromptOnInstance(
            self.prompt_id, self, instance.post, instance.is_short_of_blocks, generates=generates, close=close,
            owner_epoch=0 if stream is None else stream.owner_epoch,
        )  # fmt: skip
        on_instance.on_start = on_start
        self._on_instances.append(on_instance)
        instance.attach(on_instance)
        return on_instance

    async def next_event(self) -> tuple[PromptOnInstance, PromptEvent] | None:
        """Return the next event other than a step, or None once all sequences have ended: then no event matters.

        Raises DeadlineExceeded at the deadline, SinkFailed, and what `fail` was given.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            if not self.output.open:
                return None
            if self._events:
                return self._events.popleft()
            try:
                await self._wakeup.wait(self._next_check)
            except TimeoutError:
                if self._failure is None and self._next_check() <= self._clock():  # else something has just arrived
                    raise self.deadline_error() from None

    async def ended_within(self, on_instance: PromptOnInstance, seconds: float) -> bool:
        """Wait until `on_instance` has ended, dropping unread events; return whether it did within `seconds`."""
        deadline = self._clock() + seconds
        while not on_instance.ended:
            try:
                await self._wakeup.wait(lambda: deadline)
            except TimeoutError:
                return False
        self._events.clear()
        return True

    def on_step(self, on_instance: PromptOnInstance, step: PromptStep) -> None:
        """Emit the tokens of a step that can be released; cancel sequences that the sink no longer wants."""
        if self._failure is not None:
            return
        self._active_at = self._clock()
        output, emit, index = self.output, self._sink.emit, self.index
        try:
            if step.tokens and not on_instance.started:
                on_instance.on_start()
                on_instance.started = True
            if step.prompt_logprobs or step.prompt_ids or step.times is not None:
                self._take_report(step)
        except Exception as error:  # noqa: BLE001 - the caller is the session of all the instance's prompts
            self.fail(error)
            return
        tokens = step.tokens if self._stream is None else self._take_or_hold(on_instance, step.tokens)
        try:
            for token in tokens:
                if token.sequence in output.stopped and token.finish is None:
                    on_instance.cancel_sequence(token.sequence)
                for ready in output.add(token):
                    if not emit(index, ready):
                        self._stop(ready.sequence)
                        break
        except Exception as error:  # noqa: BLE001 - as above
            self.fail(SinkFailed(error))
        if not output.open:
            self._wakeup.set()

    def on_event(self, on_instance: PromptOnInstance, event: PromptEvent) -> None:
        """Keep an event for `next_event`."""
        self._active_at = self._clock()
        if isinstance(event, HandedOff | Pooled):
            self.add_times(event.times)
            if self._held:
                self._holds = False
                self.on_step(on_instance, PromptStep(self.prompt_id, []))
        self._events.append((on_instance, event))
        self._wakeup.set()

    def fail(self, error: Exception) -> None:
        """Make `next_event` raise `error`; later errors are ignored."""
        self._failure = self._failure or error
        self._wakeup.set()

    def answer(self, values: tuple[float, ...]) -> None:
        """Emit the vector of a pooling prompt."""
        self._sink.vector(self.index, values)

    def _take_or_hold(self, on_instance: PromptOnInstance, tokens: list[TokenOutput]) -> list[TokenOutput]:
        """Return the tokens to emit. P's first ones wait until D has the prompt: then the stream can be adopted."""
        is_last = bool(tokens) and tokens[-1].finish is not None
        self._holds = self._holds and not on_instance.generates and not is_last
        if self._holds:
            self._held += tokens
            return []
        tokens, self._held = self._held + tokens, []
        return tokens

    def _leave_stream(self, on_instance: PromptOnInstance, instance: Instance) -> None:
        """Remember where the stream was decoded; it can be resumed for a while after its end, then it is released."""
        if on_instance.started:
            self.decoded_on = instance.index, instance.description.epoch
        if on_instance.ended:  # else it is cancelled now
            asyncio.get_running_loop().call_later(instance.orphan_s, on_instance.release)

    def _take_report(self, step: PromptStep) -> None:
        if step.prompt_ids:
            self._sink.prompt_ids(self.index, step.prompt_ids)
        for part in step.prompt_logprobs:
            if (new := self._scores.add(part)) is not None:
                self._sink.prompt_logprobs(self.index, new.tokens)
        if step.times is not None:
            self.add_times(step.times)
            if not step.tokens and self.request.params.beam_search is not None:
                self._searches = True

    def _stop(self, sequence: int) -> None:
        """Stop a sequence on all instances, unless it has finished."""
        if sequence in self.output.open:
            self.output.stop(sequence)
            for on_instance in self._on_instances:
                on_instance.cancel_sequence(sequence)

    def _chain_with(self, output: tuple[int, ...]) -> Chain:
        """Return the chain of the prompt and `output`; none for requests that bypass the prefix cache."""
        request = self.request
        if request.probe or request.params.prompt_logprobs is not None:
            return ()
        ids = (*request.prompts[self.index], *output)
        if output and len(ids) // DIGEST_TOKENS == len(self._chain):
            return self._chain  # the output does not complete another digest
        return chain_of(ids, request.cache_salt, request.images_of(self.index))

    @property
    def _is_generating(self) -> bool:
        """Whether tokens arrived, or a beam search, which reports them at its end, made progress."""
        return self.output.started or self._searches

    def _next_check(self) -> float:
        """Return when to check again whether the prompt has waited too long; a time in the past if it has.

        Before the first token, the prompt is checked at least every `stall_timeout_s`. That limit starts with the first
        token, which then need not wake the path.
        A sequence that a full pool preempted waits for blocks on a working instance, and a prompt being recomputed by
        another instance sends nothing until it is done: both get as long as a first token, since the instance's own
        progress is checked separately.
        """
        now, deadline = self._clock(), self.deadline
        if not self._is_generating:
            return min(deadline, now + self.request.stall_timeout_s) if now < deadline else deadline
        has_reason = self._computes or any(on_instance.short_of_blocks() for on_instance in self._on_instances)
        if now < deadline or not has_reason:
            return deadline
        return min(now + self.request.stall_timeout_s, self._active_at + self.request.first_token_timeout_s)
