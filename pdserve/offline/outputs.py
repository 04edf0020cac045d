"""LLM's outputs: vLLM's output classes, field by field.

RequestOutput -> CompletionOutput -> {token id: Logprob} per position
BeamSearchOutput -> BeamSearchSequence
PoolingRequestOutput -> PoolingOutput; EmbeddingRequestOutput -> EmbeddingOutput; ScoringRequestOutput -> ScoringOutput
As in vLLM, attributes can be set: scripts add their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pdserve.offline.request_stats import RequestStateStats


@dataclass
class Logprob:
    """A token's log probability (natural), its rank among all tokens (1 is the likeliest), and its own text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Logprobs = Sequence[dict[int, Logprob]]
"""A list, or a FlatLogprobs for SamplingParams(flat_logprobs=True)."""
PromptLogprobs = Sequence[dict[int, Logprob] | None]


@dataclass
class CompletionOutput:
    """One output of a prompt. `cumulative_logprob` and `logprobs` are None where they were not requested.

    `finish_reason` is stop or length; `stop_reason` is the text or token id that stopped it, None for the model's EOS.
    `lora_request`, `routed_experts` and `kv_transfer_params` are always None.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: Logprobs | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: None = field(default=None, repr=False)
    routed_experts: None = field(default=None, repr=False)
    kv_transfer_params: None = field(default=None, repr=False)

    def finished(self) -> bool:
        """Return whether it has finished: always true."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A prompt and its outputs. `prompt` is None if token ids were given, and the rendered template of a chat.

    `lora_request`, the encoder fields and `kv_transfer_params` are always None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool = True
    metrics: RequestStateStats | None = field(default=None, repr=False)
    lora_request: None = field(default=None, repr=False)
    num_cached_tokens: int | None = None
    encoder_prompt: None = field(default=None, repr=False)
    encoder_prompt_token_ids: None = field(default=None, repr=False)
    kv_transfer_params: None = field(default=None, repr=False)


@dataclass
class BeamSearchSequence:
    """One hypothesis: tokens and text, each including the prompt's, and the sum of its tokens' log probabilities."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The hypotheses of one prompt, the best first."""

    sequences: list[BeamSearchSequence]


@dataclass(repr=False)
class PoolingOutput:
    """The pooler's output for one prompt: a list of numbers, or one such list for each token."""

    data: list[Any]

    def __repr__(self) -> str:
        """Return only the length of the list."""
        unit = "tokens" if self.data and isinstance(self.data[0], list) else "numbers"
        return f"PoolingOutput(data=[{len(self.data)} {unit}])"


@dataclass
class PoolingRequestOutput:
    """A prompt and its pooled output."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(repr=False)
class EmbeddingOutput:
    """A vector."""

    embedding: list[float]

    def __repr__(self) -> str:
        """Return only the length of the vector."""
        return f"EmbeddingOutput(hidden_size={self.hidden_size})"

    @property
    def hidden_size(self) -> int:
        """Length of the vector."""
        return len(self.embedding)


@dataclass
class EmbeddingRequestOutput:
    """A prompt and its vector."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(repr=False)
class ClassificationOutput:
    """The probability of each class."""

    probs: list[float]

    def __repr__(self) -> str:
        """Return only the number of classes."""
        return f"ClassificationOutput(num_classes={self.num_classes})"

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.probs)


@dataclass
class ClassificationRequestOutput:
    """A prompt and its classes."""

    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass
class ScoringOutput:
    """The similarity of two texts."""

    score: float


@dataclass
class ScoringRequestOutput:
    """A pair and its score. `prompt_token_ids` is empty: the server returns the score only."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True
