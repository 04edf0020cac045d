"""Convert a running request's tokens to pieces of text for each choice that the client gets."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from scheduler.observability.request_done import RequestDone
from scheduler.observability.request_log import Reporting
from scheduler.request import GenerationRequest, PromptDone, TokenSink
from scheduler.text.best_of import BestOf, ranked
from scheduler.text.parsed_choice import ParsedChoice, choice_of
from scheduler.text.pieces import TextOptions, TextPiece
from scheduler.tokens import Tokens
from wire.errors import InternalError, PdserveError
from wire.types import FinishReason, TokenLogprobs, TokenOutput

Dispatch = Callable[[GenerationRequest, TokenSink], Awaitable[None]]
_BROKEN = (FinishReason.CANCELLED, FinishReason.FAILED)


class Observer(Protocol):
    """Observes a request; times are the loop's clock. Implemented by scheduler/observability/counters.py and others."""

    def first_token_came(self, request: GenerationRequest, seconds: float) -> None:
        """Called for the request's first token, `seconds` after its arrival; `choice_started` follows."""
        ...

    def choice_started(self) -> None:
        """Called for each choice's first token."""
        ...

    def token_gap(self, seconds: float, /) -> None:
        """Called for each other token, `seconds` after the one before."""
        ...

    def prompt_done(self, done: PromptDone) -> None:
        """Called when a prompt's hand-off is complete."""
        ...

    def request_done(self, done: RequestDone) -> None:
        """Called when the request has ended."""
        ...


class TextOutput:
    """Runs one request and passes its text on piece by piece. Implements TokenSink. Counts are complete after `run`.

    `scored[i]` has the log probabilities of prompt i's tokens, if requested: complete before its first piece.
    """

    def __init__(
        self, request: GenerationRequest, options: TextOptions, tokens: Tokens, observer: Observer,
        clock: Callable[[], float] | None = None, started_s: float | None = None,
    ) -> None:  # fmt: skip
        """`started_s`: when the request arrived, by the same clock; None: now."""
        self._request = request = ranked(request)
        self._clock = clock or asyncio.get_running_loop().time
        self._observer, self._token_gap = observer, observer.token_gap
        self._num_sequences = count = request.params.num_sequences
        n = request.params.n
        echoes = options.echo or ("",) * len(request.prompts)
        self._choices = [
            choice_of(at * count + sequence, prompt, tokens, options, echo=echoes[at])
            for at, prompt in enumerate(request.prompts)
            for sequence in range(count)
        ]
        self._reasons = options.reasoning is not None
        self._num_open = len(self._choices)  # choices whose last piece was not passed on
        self._best_of = [
            None if n == count else BestOf(n, count, first_index=at * n) for at in range(len(request.prompts))
        ]
        self.scored: list[list[TokenLogprobs | None]] = [[] for _ in request.prompts]
        self._started_s = self._clock() if started_s is None else started_s
        self._dispatched_s = 0.0
        self._first_token_s: float | None = None
        self.served: list[PromptDone] = []

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """The token ids of the prompts."""
        return self._request.prompts

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self._request.prompts))

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all sequences, including unselected ones and stop tokens."""
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Output tokens that are thinking, None if no parser finds it."""
        if not self._reasons:
            return None
        return sum(choice.num_reasoning_tokens for choice in self._choices if isinstance(choice, ParsedChoice))

    async def run(self, dispatch: Dispatch, put: Callable[[TextPiece], None]) -> None:
        """Run the request; `put` gets each piece as it is made. Cancelling this cancels the request everywhere.

        Raises a PdserveError if it failed.
        """
        self._put = put
        with Reporting(self._observer.request_done, self.request_done):
            self._dispatched_s = self._clock() - self._started_s
            try:
                await dispatch(self._request, self)
            except PdserveError:
                if self._num_open:  # else the client has all text: only the cleanup failed
                    raise
            finally:
                del self._put  # its owner refers to this object: a cycle
            if self._num_open:
                raise InternalError(f"request {self._request.request_id} ended before all of its choices did")

    def emit(self, prompt_index: int, token: TokenOutput) -> bool:
        """Pass on the text that a token completes; return whether the choice needs more."""
        choice = self._choices[prompt_index * self._num_sequences + token.sequence]
        if choice.finished:
            return False
        if token.finish in _BROKEN:
            raise InternalError(f"a sequence of {self._request.request_id} ended as {token.finish}, without a reason")
        if token.token_id is not None:
            now, previous = self._clock(), choice.last_token_s
            if self._first_token_s is None:
                self._first_token_s = now - self._started_s
                self._observer.first_token_came(self._request, self._first_token_s)
            if previous is None:
                self._observer.choice_started()
            else:
                self._token_gap(now - previous)
            choice.last_token_s = now
        piece = choice.push(token)
        if piece is not None:
            best_of = self._best_of[prompt_index]
            for released in (piece,) if best_of is None else best_of.add(token.sequence, piece):
                self._put(released)
            self._num_open -= choice.finished
        return not choice.finished

    def prompt_ids(self, prompt_index: int, token_ids: tuple[int, ...]) -> None:
        """Replace the ids of the only prompt with those that the worker rendered: usage counts them."""
        self._request = dataclasses.replace(self._request, prompts=(token_ids,))

    def prompt_logprobs(self, prompt_index: int, tokens: Sequence[TokenLogprobs | None]) -> None:
        """Keep the log probabilities of a prompt's tokens."""
        self.scored[prompt_index].extend(tokens)

    def vector(self, prompt_index: int, values: tuple[float, ...]) -> None:
        """Refuse a vector."""
        raise InternalError(f"{self._request.request_id} requested text but got a vector")

    def prompt_done(self, done: PromptDone) -> None:
        """Keep the report of a prompt."""
        self.served.append(done)
        self._observer.prompt_done(done)

    def request_done(self, outcome: str = "finished", error: str = "") -> RequestDone:
        """Return the record of the request with this outcome."""
        last_token_s = max((choice.last_token_s or 0.0 for choice in self._choices), default=0.0) - self._started_s
        return RequestDone(
            self._request, tuple(self.served), outcome, self._clock() - self._started_s, self._dispatched_s,
            self._first_token_s, None if self._first_token_s is None else last_token_s, self.num_output_tokens,
            tuple(choice.finish_reason for choice in self._choices if choice.finish_reason is not None), error,
        )  # fmt: skip
