"""A request inside the scheduler, and the interface to the receiver of its tokens.

api/* --GenerationRequest--> dispatch --TokenSink.emit--> text_output --> api/*
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from scheduler.request_class import UNCLASSED, RequestClass
from wire.cheap_dataclass import cheap_dataclass
from wire.types import (
    Pooling,
    PromptImage,
    ResumableStream,
    SamplingParams,
    StageTimes,
    TokenLogprobs,
    TokenOutput,
    WorkerChat,
)


@cheap_dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One validated request. `prompts[i]` are token ids; all prompts have the same `params`, but are placed separately.

    `params.seed` and `params.max_tokens` are set; `seeds`, if given, has one per prompt instead. Timeouts are
    in seconds: to the first token, and without progress. `poolings`, if given, has one per prompt: then nothing is
    generated, and each prompt is answered by one vector. `cache_salt` limits KV sharing to requests with the same salt.
    `traceparent` is the trace that workers of other engines continue, empty without one.
    `tenant` is the name of the API key whose share of the cluster it uses, or empty; a lower `priority` runs earlier.
    `stream`, if given, makes the only prompt's answer resumable by another scheduler.
    `images`, if given, has those of each prompt; `chat` is the only prompt as workers of other engines get it.
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
    traceparent: str = ""
    images: tuple[tuple[PromptImage, ...], ...] = ()
    chat: WorkerChat | None = None
    request_class: RequestClass = UNCLASSED
    stream: ResumableStream | None = None

    @property
    def prefill_only(self) -> bool:
        """Whether its prompts finish on the instances that compute them: without a token, or with the first one."""
        return bool(self.poolings) or self.params.max_tokens == 1

    def images_of(self, prompt_index: int) -> tuple[PromptImage, ...]:
        """Return the images of the prompt."""
        return self.images[prompt_index] if self.images else ()

    def params_of(self, prompt_index: int) -> SamplingParams:
        """Return the parameters of the prompt."""
        return dataclasses.replace(self.params, seed=self.seeds[prompt_index]) if self.seeds else self.params


@cheap_dataclass(frozen=True, slots=True)
class PromptDone:
    """A prompt whose sequences and hand-off are complete: its stage durations and how it was served.

    The fields describe the last of its `tries`: it took `seconds`, and was expected to take `expected_s` (0: unknown).
    """

    prompt_index: int
    path: str
    reason: str
    prefill_instance: str | None
    decode_instance: str | None
    times: StageTimes
    tries: int = 1
    seconds: float = 0.0
    expected_s: float = 0.0


class TokenSink(Protocol):
    """Receives the output of one request as it arrives. An error that a method raises fails the request."""

    def emit(self, prompt_index: int, token: TokenOutput) -> bool:
        """Take the next token of a sequence of the prompt; return whether more of the sequence is wanted.

        Per sequence the indices ascend without gaps or repeats; `finish` is set on its last token, exactly once.
        """
        ...

    def prompt_ids(self, prompt_index: int, token_ids: tuple[int, ...]) -> None:
        """Take the ids of a prompt that a worker of another engine has rendered, before its first output."""
        ...

    def prompt_logprobs(self, prompt_index: int, tokens: Sequence[TokenLogprobs | None]) -> None:
        """Take the log probabilities of the prompt's next tokens, if requested: all before its first output."""
        ...

    def vector(self, prompt_index: int, values: tuple[float, ...]) -> None:
        """Take the answer to a pooling prompt: the values of its `Pooling.kind`."""
        ...

    def prompt_done(self, done: PromptDone) -> None:
        """Take the report of a prompt whose sequences have all finished and whose hand-off is complete."""
        ...


class Dispatcher(Protocol):
    """Runs requests. `scheduler/dispatch.py` is the implementation."""

    def check_room(self, tenant: str, request_class: RequestClass = UNCLASSED) -> None:
        """Raise Overloaded if not even a one-token prompt may wait; called before a request is read."""
        ...

    async def run(self, request: GenerationRequest, sink: TokenSink) -> None:
        """Run a request to its end; cancelling the call cancels the request everywhere.

        Raises Overloaded when the queue is full, Unavailable when no path exists, or the PdserveError that failed it.
        """
        ...
