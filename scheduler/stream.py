"""From a running request's tokens to pieces of text, choice by choice: detokenise, find stop strings, cut."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Protocol, cast

from scheduler.detokenizer import Detokenizer
from scheduler.request import Dispatcher, GenerationRequest, NewToken, PathEvent, PromptDone, RunningRequest, Vector
from scheduler.request_log import log_request
from scheduler.stops import StopFinder
from scheduler.tokens import Tokens
from wire.errors import Cancelled, InternalError, PdserveError
from wire.types import FinishReason

_CONTEXT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How output tokens become text. `silent_stop_ids` end a choice without being its stop_reason (EOS)."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    silent_stop_ids: frozenset[int] = field(default_factory=frozenset)
    continues_prompt: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of choice `index` (prompt * n + sequence); `finish_reason` is set on its last piece."""

    index: int
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Observer(Protocol):
    """Hears how a request goes; times are the loop's clock. scheduler/metrics.py is one."""

    def token(self, started_s: float, previous_s: float | None, now_s: float, *, first: bool) -> None:
        """A token came; `previous_s` is when the same choice's last one did, `first` the whole request's first."""
        ...

    def prompt_done(self, done: PromptDone) -> None:
        """A prompt's hand-off is settled."""
        ...

    def request_done(self, num_prompt_tokens: int, num_output_tokens: int, seconds: float, ending: str) -> None:
        """The request ended: `finished`, `cancelled` or `failed`."""
        ...


class _Choice:
    """One sequence: its text so far and how it ended."""

    def __init__(self, index: int, prompt: tuple[int, ...], tokens: Tokens, options: TextOptions) -> None:
        self.finished = False
        self.num_tokens = 0
        self.last_token_s: float | None = None
        self._index = index
        self._options = options
        self._detokenizer = Detokenizer(
            tokens,
            skip_special_tokens=options.skip_special_tokens,
            context=prompt[-_CONTEXT_TOKENS:] if options.continues_prompt else (),
        )
        self._finder = StopFinder(options.stops, include=options.include_stop)

    def push(self, event: NewToken) -> Piece | None:
        """Return what the event adds, None if nothing can be shown yet."""
        text = ""
        if event.token_id is not None:
            self.num_tokens += 1
            if event.stop_token_id is None or self._options.include_stop:
                text = self._detokenizer.push(event.token_id)
        if event.finish is not None:
            text += self._detokenizer.flush()
        stop: str | None = None
        if event.index >= self._options.min_tokens:
            text, stop = self._finder.push(text)
        if stop is not None:
            self.finished = True
            return Piece(self._index, text, "stop", stop)
        if event.finish is not None:
            self.finished = True
            return Piece(self._index, text + self._finder.flush(), event.finish.value, self._stop_reason(event))
        return Piece(self._index, text) if text else None

    def _stop_reason(self, event: NewToken) -> int | None:
        return None if event.stop_token_id in self._options.silent_stop_ids else event.stop_token_id


class TextStream:
    """Runs one request and yields its text. Counts are whole once `pieces` has ended."""

    def __init__(
        self, request: GenerationRequest, options: TextOptions, tokens: Tokens, observer: Observer,
        clock: Callable[[], float] | None = None, started_s: float | None = None,
    ) -> None:  # fmt: skip
        """`started_s`: when the request arrived, by the same clock; None is now."""
        n = request.params.n
        self._request = request
        self._clock = clock or asyncio.get_running_loop().time
        self._observer = observer
        self._choices = [
            _Choice(at * n + sequence, prompt, tokens, options)
            for at, prompt in enumerate(request.prompts)
            for sequence in range(n)
        ]
        self._started_s = self._clock() if started_s is None else started_s
        self._first_token_s: float | None = None
        self.served: list[PromptDone] = []

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self._request.prompts))

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all choices, the ones that ended them included."""
        return sum(choice.num_tokens for choice in self._choices)

    async def pieces(self, dispatcher: Dispatcher) -> AsyncGenerator[Piece, None]:
        """Run the request. Closing the generator cancels it everywhere. Raises a PdserveError if it failed."""
        with self._told_to_observer():
            running = dispatcher.start(self._request)
            async with aclosing(cast("AsyncGenerator[PathEvent, None]", running.events())) as events:
                try:
                    async for event in events:
                        piece = self._take(running, event)
                        if piece is not None:
                            yield piece
                except PdserveError:
                    if not self._complete():  # else the client has every word: only the tidying up failed
                        raise
            if not self._complete():
                raise InternalError(f"request {self._request.request_id} ended before all of its choices did")

    def _take(self, running: RunningRequest, event: PathEvent) -> Piece | None:
        if isinstance(event, PromptDone):
            self.served.append(event)
            self._observer.prompt_done(event)
            return None
        if isinstance(event, Vector):
            raise InternalError(f"{self._request.request_id} asked for text and was answered with a vector")
        choice = self._choices[event.prompt * self._request.params.n + event.sequence]
        if choice.finished:
            return None
        if event.finish in (FinishReason.CANCELLED, FinishReason.FAILED):
            raise InternalError(f"a sequence of {self._request.request_id} ended as {event.finish}, without a reason")
        if event.token_id is not None:
            self._time_token(choice)
        piece = choice.push(event)
        if choice.finished and event.finish is None:
            running.stop_sequence(event.prompt, event.sequence)
        return piece

    def _time_token(self, choice: _Choice) -> None:
        now = self._clock()
        first = self._first_token_s is None
        self._observer.token(self._started_s, choice.last_token_s, now, first=first)
        choice.last_token_s = now
        if first:
            self._first_token_s = now - self._started_s

    @contextmanager
    def _told_to_observer(self) -> Iterator[None]:
        ending = "failed"
        try:
            yield
            ending = "finished"
        except (asyncio.CancelledError, GeneratorExit, Cancelled):
            ending = "cancelled"
            raise
        finally:
            seconds, num_output_tokens = self._clock() - self._started_s, self.num_output_tokens
            self._observer.request_done(self.num_prompt_tokens, num_output_tokens, seconds, ending)
            log_request(
                self._request, self.served, ending=ending, output_tokens=num_output_tokens,
                first_token_s=self._first_token_s, seconds=seconds,
            )  # fmt: skip

    def _complete(self) -> bool:
        return all(choice.finished for choice in self._choices)
