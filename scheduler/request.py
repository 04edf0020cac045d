"""A request as the scheduler's parts pass it on, and what comes back while it runs.

api/* --GenerationRequest--> dispatch --PathEvent--> stream --> api/*
"""

import dataclasses
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from wire.types import FinishReason, Pooling, SamplingParams, StageTimes, TokenLogprobs


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One validated request. `prompts[i]` are token ids; every prompt runs with the same `params`, placed alone.

    `params.seed` and `params.max_tokens` are set; `seeds`, where given, are one for each prompt instead. Limits in
    seconds: to the first token, and without progress. `poolings`, where given, are one for each prompt: nothing is
    generated then, each prompt is answered by one Vector. `cache_salt` is whose KV it may share: the tenant's.
    `tenant` is whose share of the cluster it takes, the name of an API key or empty; a lower `priority` runs earlier.
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
        """Whether its prompts end on the instances that compute them: with no token, or with the first one."""
        return bool(self.poolings) or self.params.max_tokens == 1

    def params_of(self, prompt: int) -> SamplingParams:
        """Return the parameters that prompt `prompt` runs with."""
        return dataclasses.replace(self.params, seed=self.seeds[prompt]) if self.seeds else self.params


@dataclass(slots=True)  # not frozen, as TokenLogprobs
class NewToken:
    """The next token of sequence `sequence` of prompt `prompt`; indices ascend without gap or repeat.

    `finish` is set on the last event of each sequence, exactly once; token_id is None if it ended without a token.
    `logprobs` are there if the request asked.
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
    """How likely tokens [start, start + len(tokens)) of prompt `prompt` are, if the request asked; None for token 0.

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
    """All sequences of a prompt ended and its hand-off is settled: its stage durations and how it was served.

    It had so many `tries`; what stands here is of the last.
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
    """A request under way."""

    def events(self) -> AsyncIterator[PathEvent]:
        """Yield events until every prompt is done. Raises a PdserveError when the request failed as a whole.

        Closing the iterator early (aclose, cancellation) cancels the request everywhere.
        """
        ...

    def divert(self, taker: Callable[[NewToken], bool]) -> None:
        """Let `taker` have tokens as they come, whenever the reader of `events` waits for one; it says if it took it.

        An implementation need not: then all is read.
        """
        ...

    def stop_sequence(self, prompt: int, sequence: int) -> None:
        """End one sequence from here (a stop string was seen): its next event has finish STOP and no token."""
        ...


class Dispatcher(Protocol):
    """Runs requests. `scheduler/dispatch.py` is the implementation."""

    def check_room(self, tenant: str) -> None:
        """Raise Overloaded where not even one prompt of one token more may wait: asked before a request is read."""
        ...

    def start(self, request: GenerationRequest) -> RunningRequest:
        """Take a request. Raises Overloaded when the queue is full and Unavailable when no path exists."""
        ...
