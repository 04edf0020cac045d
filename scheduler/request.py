"""A request inside the scheduler, and the events of its execution.

api/* --GenerationRequest--> dispatch --PathEvent--> stream --> api/*
"""

import dataclasses
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from wire.types import FinishReason, Pooling, SamplingParams, StageTimes, TokenLogprobs


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One validated request. `prompts[i]` are token ids; every prompt runs with the same `params`, placed on its own.

    `params.seed` and `params.max_tokens` are set; `seeds`, if given, has one per prompt instead. Timeouts in
    seconds: to the first token, and without progress. `poolings`, if given, has one per prompt: then nothing is
    generated, and each prompt is answered by one Vector. `cache_salt` limits KV sharing to requests with the same one.
    `tenant` is whose share of the cluster it uses, the name of an API key or empty; a lower `priority` runs earlier.
    """

    request_id: str
    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    first_token_timeout_s: float
    stall_timeout_s: float
    probe: bool = False
    seeds: tuple[int, ...] = ()
    poolings: tuple[Pooling, ...] = ()
    cache_salt: str = ""
    priority: int = 0
    tenant: str = ""

    @property
    def stays(self) -> bool:
        """Whether its prompts finish on the instances that compute them: without a token, or with the first one."""
        return bool(self.poolings) or self.params.max_tokens == 1

    def params_of(self, prompt: int) -> SamplingParams:
        """Return the parameters of prompt `prompt`."""
        return dataclasses.replace(self.params, seed=self.seeds[prompt]) if self.seeds else self.params


@dataclass(slots=True)  # not frozen, as TokenLogprobs
class NewToken:
    """The next token of sequence `sequence` of prompt `prompt`; indices ascend without gap or repeat.

    `finish` is set on the last event of each sequence, exactly once; token_id is None if it ended without a token.
    `logprobs` are set if requested.
    """

    prompt: int
    sequence: int
    index: int
    token_id: int | None
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log probabilities of tokens [start, start + len(tokens)) of prompt `prompt`, if requested; None for token 0.

    Each token once, in order, and all before the prompt's first output.
    """

    prompt: int
    start: int
    tokens: tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, slots=True)
class Vector:
    """The answer to prompt `prompt` of a request with poolings: its vector, or its score as the only value."""

    prompt: int
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PromptDone:
    """All sequences of a prompt finished and its hand-off is complete: its stage durations and how it was served.

    The fields describe the last of its `tries`.
    """

    prompt: int
    path: str
    reason: str
    prefill_instance: str | None
    decode_instance: str | None
    times: StageTimes
    tries: int = 1


PathEvent = NewToken | PromptScored | Vector | PromptDone


class RunningRequest(Protocol):
    """A running request."""

    def events(self) -> AsyncIterator[PathEvent]:
        """Yield events until every prompt is done. Raises a PdserveError when the request failed as a whole.

        Closing the iterator early (aclose, cancellation) cancels the request everywhere.
        """
        ...

    def divert(self, taker: Callable[[NewToken], bool]) -> None:
        """Pass tokens directly to `taker` while the reader of `events` waits; it returns whether it took the token.

        An implementation may ignore this: then all events are read.
        """
        ...

    def stop_sequence(self, prompt: int, sequence: int) -> None:
        """Stop one sequence (a stop string was found): its next event has finish STOP and no token."""
        ...


class Dispatcher(Protocol):
    """Runs requests. `scheduler/dispatch.py` is the implementation."""

    def check_room(self, tenant: str) -> None:
        """Raise Overloaded if not even a one-token prompt may wait; called before a request is read."""
        ...

    def start(self, request: GenerationRequest) -> RunningRequest:
        """Start a request. Raises Overloaded when the queue is full and Unavailable when no path exists."""
        ...
