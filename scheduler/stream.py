"""Convert a running request's tokens to pieces of text per choice, the best ones if more are generated."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Protocol, cast

from scheduler.observability.request_done import RequestDone
from scheduler.observability.request_log import log_request
from scheduler.request import (
    Dispatcher,
    GenerationRequest,
    NewToken,
    PathEvent,
    PromptDone,
    PromptScored,
    RunningRequest,
    Vector,
)
from scheduler.text.best_of import BestOf, ranked
from scheduler.text.choice import Choice
from scheduler.text.pieces import TextOptions, TextPiece
from scheduler.tokens import Tokens
from wire.errors import Cancelled, InternalError, PdserveError
from wire.types import FinishReason, TokenLogprobs


class Observer(Protocol):
    """Observes a request; times are the loop's clock. Implemented by scheduler/observability/counters.py, for one."""

    def first_token_came(self, request: GenerationRequest, seconds: float) -> None:
        """Called for the request's first token, `seconds` after its arrival; `token_came` follows."""
        ...

    def token_came(self, since_previous_s: float | None) -> None:
        """Called for each token with the time since the same choice's last one; None for its first."""
        ...

    def prompt_done(self, done: PromptDone) -> None:
        """Called when a prompt's hand-off is complete."""
        ...

    def request_done(self, done: RequestDone) -> None:
        """Called when the request ended."""
        ...


class PieceOutlet(Protocol):
    """Accepts pieces directly, bypassing the reader of the stream."""

    @property
    def is_free(self) -> bool:
        """Whether the client's buffer has room for another piece."""
        ...

    def put(self, piece: TextPiece) -> None:
        """Write a piece."""
        ...


class TextStream:
    """Runs one request and yields its text. Counts are complete once `pieces` has ended.

    `prompt_logprobs[i]` has the log probabilities of prompt i's tokens, if requested: complete before its first piece.
    """

    def __init__(
        self, request: GenerationRequest, options: TextOptions, tokens: Tokens, observer: Observer,
        clock: Callable[[], float] | None = None, started_s: float | None = None,
    ) -> None:  # fmt: skip
        """`started_s`: when the request arrived, by the same clock; None is now."""
        self._request = request = ranked(request)
        self._clock = clock or asyncio.get_running_loop().time
        self._observer = observer
        count, n = request.params.num_sequences, request.params.n
        echoes = options.echo or ("",) * len(request.prompts)
        self._choices = [
            Choice(at * count + sequence, prompt, tokens, options, echo=echoes[at])
            for at, prompt in enumerate(request.prompts)
            for sequence in range(count)
        ]
        self._chosen = [BestOf(n, count, first_index=at * n) for at in range(len(request.prompts))]
        self.prompt_logprobs: list[list[TokenLogprobs | None]] = [[] for _ in request.prompts]
        self._started_s = self._clock() if started_s is None else started_s
        self._dispatched_s = 0.0
        self._first_token_s: float | None = None
        self.served: list[PromptDone] = []

    def prompt_ids(self, prompt: int) -> tuple[int, ...]:
        """Return the token ids of prompt `prompt`."""
        return self._request.prompts[prompt]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self._request.prompts))

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all sequences, including unselected ones and stop tokens."""
        return sum(choice.num_tokens for choice in self._choices)

    async def pieces(
        self, dispatcher: Dispatcher, outlet: PieceOutlet | None = None
    ) -> AsyncGenerator[TextPiece, None]:
        """Run the request. Closing the generator cancels it everywhere. Raises a PdserveError if it failed.

        While the caller waits for a piece and `outlet` is free, pieces are written there, in the same order.
        """
        with self._observed():
            self._dispatched_s = self._clock() - self._started_s
            running = dispatcher.start(self._request)
            if outlet is not None:
                running.divert(partial(self._pass_on, running, outlet))
            async with aclosing(cast("AsyncGenerator[PathEvent, None]", running.events())) as events:
                try:
                    async for event in events:
                        for piece in self._take(running, event):
                            yield piece
                except PdserveError:
                    if not self._complete():  # else the client has all text: only the cleanup failed
                        raise
            if not self._complete():
                raise InternalError(f"request {self._request.request_id} ended before all of its choices did")

    def _pass_on(self, running: RunningRequest, outlet: PieceOutlet, event: NewToken) -> bool:
        if not outlet.is_free:
            return False
        for piece in self._take_token(running, event):
            outlet.put(piece)
        return True

    def _take(self, running: RunningRequest, event: PathEvent) -> list[TextPiece]:
        match event:
            case PromptDone():
                self.served.append(event)
                self._observer.prompt_done(event)
                return []
            case PromptScored():
                self.prompt_logprobs[event.prompt].extend(event.tokens)
                return []
            case Vector():
                raise InternalError(f"{self._request.request_id} requested text but got a vector")
            case NewToken():
                return self._take_token(running, event)

    def _take_token(self, running: RunningRequest, event: NewToken) -> list[TextPiece]:
        choice = self._choices[event.prompt * self._request.params.num_sequences + event.sequence]
        if choice.finished:
            return []
        if event.finish in (FinishReason.CANCELLED, FinishReason.FAILED):
            raise InternalError(f"a sequence of {self._request.request_id} ended as {event.finish}, without a reason")
        if event.token_id is not None:
            self._time_token(choice)
        piece = choice.push(event)
        if choice.finished and event.finish is None:
            running.stop_sequence(event.prompt, event.sequence)
        return [] if piece is None else self._chosen[event.prompt].add(event.sequence, piece)

    def _time_token(self, choice: Choice) -> None:
        now, previous = self._clock(), choice.last_token_s
        if self._first_token_s is None:
            self._first_token_s = now - self._started_s
            self._observer.first_token_came(self._request, self._first_token_s)
        self._observer.token_came(None if previous is None else now - previous)
        choice.last_token_s = now

    @contextmanager
    def _observed(self) -> Iterator[None]:
        ending, error = "failed", ""
        try:
            yield
            ending = "finished"
        except (asyncio.CancelledError, GeneratorExit, Cancelled):
            ending = "cancelled"
            raise
        except Exception as failure:
            error = type(failure).__name__
            raise
        finally:
            done = self._done(ending, error)
            self._observer.request_done(done)
            log_request(done)

    def _done(self, ending: str, error: str) -> RequestDone:
        last_token_s = max((choice.last_token_s or 0.0 for choice in self._choices), default=0.0) - self._started_s
        return RequestDone(
            self._request, tuple(self.served), ending, self._clock() - self._started_s, self._dispatched_s,
            self._first_token_s, None if self._first_token_s is None else last_token_s, self.num_output_tokens,
            tuple(choice.finish_reason for choice in self._choices if choice.finish_reason is not None), error,
        )  # fmt: skip

    def _complete(self) -> bool:
        return all(choice.finished for choice in self._choices)
