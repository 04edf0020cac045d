"""Sampling parameters: vLLM's SamplingParams and BeamSearchParams, with vLLM's fields, defaults and limits.

Fields are checked when the object is created, and again when it is used.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Self

from pdserve.offline.structured_params import StructuredOutputsParams, structured_body
from pdserve.offline.user_errors import hide_internal_frames
from wire.parameter_rules import Bounds
from wire.types import PARAMETERS


class RequestOutputKind(Enum):
    """How vLLM's engine emits outputs while generating; `generate` always returns complete outputs."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(slots=True)
class RepetitionDetectionParams:
    """When to stop an output that repeats itself; never for `max_pattern_size` 0. The server checks the fields.

    The output stops when it ends in `min_count` repetitions of a pattern of `min_pattern_size` (0: 1) to
    `max_pattern_size` tokens.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """The parameters of one prompt or of many. Raises ValueError naming the field, its value and its limit.

    `max_tokens` None is the rest of the context. `seed` None is derived from LLM's seed and the prompt's number, random
    if LLM has none. `logprobs` -1 is the whole vocabulary, if `max_logprobs` allows it.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    logprob_token_ids: list[int] | None = None
    repetition_detection: RepetitionDetectionParams | Mapping[str, int] | None = None
    thinking_token_budget: int | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    guided_decoding: StructuredOutputsParams | Mapping[str, Any] | None = None
    logits_processors: Sequence[Callable[..., Any]] | None = None
    flat_logprobs: bool = False
    # Accepted without effect: how outputs are streamed, kept and cached.
    output_kind: RequestOutputKind | None = None
    stream_interval: int | None = None
    skip_clone: bool = False
    skip_reading_prefix_cache: bool | None = None
    routed_experts_prompt_start: int = 0
    # Refused because they would change outputs: _REFUSED has the reasons.
    extra_args: Mapping[str, Any] | None = None
    prompt_logprob_start: int | None = None
    prompt_logprob_token_ids: list[int] | None = None
    trace_decode_token_ids: list[int] | None = None
    watermarking: bool | None = None

    @hide_internal_frames
    def __post_init__(self) -> None:
        self.check()

    def __repr__(self) -> str:
        """Return the call that creates an equal object, with every field."""
        return f"SamplingParams({', '.join(f'{field.name}={getattr(self, field.name)!r}' for field in fields(self))})"

    @classmethod
    def from_optional(cls, **values: Any) -> Self:
        """Return the parameters with the default for each None."""
        return cls(**{name: value for name, value in values.items() if value is not None})

    def clone(self) -> Self:
        """Return a copy that shares nothing."""
        return copy.deepcopy(self)

    def check(self) -> None:
        """Raise ValueError for the first field outside its limits."""
        for name, (kind, bounds) in _NUMBERS.items():
            value = getattr(self, name)
            if kind is float:
                _check_number(name, value, bounds)
            elif value is not None or kind is int:
                _check_count(name, value, bounds.minimum)
        self._check_together()

    def _check_together(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of {self.best_of} is less than n {self.n}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        if (
            max(self.n, self.best_of or 1) > 1
            and not self.use_beam_search
            and (self.temperature == 0 or self.top_k == 1)
        ):
            raise ValueError(f"n must be 1 when using greedy sampling (temperature 0 or top_k 1), got {self.n}")
        if self.use_beam_search and max(self.n, self.best_of or 1) < 2:
            raise ValueError(f"use_beam_search needs n or best_of of 2 or more, got {self.n}")
        if not all(self.stops):
            raise ValueError("stop contains an empty string")
        if self.stops and not self.detokenize:
            raise ValueError("stop needs detokenize: stop strings are searched for in the text")
        if self.truncate_prompt_tokens is not None and not (
            self.truncate_prompt_tokens >= 1 or self.truncate_prompt_tokens == -1
        ):
            raise ValueError(f"truncate_prompt_tokens is {self.truncate_prompt_tokens}, but must be -1, or 1 or more")
        for name, (nothing, why) in _REFUSED.items():
            if getattr(self, name) not in nothing:
                raise ValueError(f"{name} is not supported: {why}")
        rule = self.repetition_detection
        if not isinstance(rule, RepetitionDetectionParams | Mapping | None):
            raise ValueError(f"repetition_detection is {rule!r}, but must be RepetitionDetectionParams or a mapping")
        if self.structured_outputs is not None and self.guided_decoding is not None:
            raise ValueError("structured_outputs and guided_decoding both constrain the output: use one")
        structured_body(self.structured_outputs or self.guided_decoding)

    @property
    def stops(self) -> list[str]:
        """The stop strings, as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def bound_prompt(self) -> bool:
        """Whether a prompt must fit without truncation."""
        return self.truncate_prompt_tokens is None


@dataclass(slots=True)
class BeamSearchParams:
    """A search for the likeliest output, `beam_width` beams wide. Raises ValueError."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    skip_special_tokens: bool = True
    watermarking: bool | None = None

    @hide_internal_frames
    def __post_init__(self) -> None:
        if self.structured_outputs is not None:
            raise ValueError("structured_outputs is not supported for beams: use generate")
        if self.watermarking:
            raise ValueError(f"watermarking is not supported: {_REFUSED['watermarking'][1]}")
        _check_count("beam_width", self.beam_width, 1)
        _check_count("max_tokens", self.max_tokens, 1)
        _check_number("length_penalty", self.length_penalty, PARAMETERS["length_penalty"].client)
        if self.temperature != 0:
            raise ValueError(
                f"temperature is {self.temperature:g}, but must be 0: beams are ranked by the model's log probabilities"
            )


_NONE: tuple[Any, ...] = (None,)
_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "logits_processors": ((None, [], ()), "the engine may be on another machine"),
    "extra_args": ((None, {}), "they are for plugins of vLLM's engine, which pdserve does not use"),
    "prompt_logprob_start": (_NONE, "prompt_logprobs returns all of them, from the first"),
    "prompt_logprob_token_ids": (_NONE, "prompt_logprobs=-1 returns all of them, with LLM(max_logprobs=-1)"),
    "trace_decode_token_ids": (_NONE, "prompt_logprobs returns the log probabilities of given tokens"),
    "watermarking": ((None, False), "outputs are sampled without a watermark"),
}
"""vLLM's fields that would change outputs: the values that do not, and why others are refused."""
NOT_SENT = frozenset((
    *_REFUSED, "detokenize", "flat_logprobs", "output_kind", "stream_interval", "skip_clone",
    "skip_reading_prefix_cache", "routed_experts_prompt_start",
))  # fmt: skip
"""The fields that are not sent to a server."""
_NUMBERS = {
    field.name: (field.type, PARAMETERS[field.name].client)
    for field in fields(SamplingParams)
    if field.name in PARAMETERS and field.type in (int, float, int | None)
}
"""Type and bounds of the fields that are numbers."""


def _check_number(name: str, value: Any, bounds: Bounds) -> None:
    minimum, maximum = bounds.minimum, bounds.maximum
    if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
        raise ValueError(f"{name} is {value!r}, but must be a number in [{minimum:g}, {maximum:g}]")
    if not bounds.allow(value):
        raise ValueError(f"{name} is {value!r}, but must be {bounds}")


def _check_count(name: str, value: Any, minimum: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < 2**63:
        raise ValueError(f"{name} is {value!r}, but must be a whole number of {minimum} or more")
