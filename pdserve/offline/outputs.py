"""What LLM returns: vLLM's output classes, field by field.

RequestOutput -> CompletionOutput -> {token id: Logprob} a position
BeamSearchOutput -> BeamSearchSequence
PoolingRequestOutput -> PoolingOutput; EmbeddingRequestOutput -> EmbeddingOutput; ScoringRequestOutput -> ScoringOutput
Attributes can be set, as there: scripts label outputs with their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.offline.request_stats import RequestStateStats


@dataclass
class Logprob:
    """How likely a token was: natural logarithm, its place among all tokens (1 is the likeliest), its text alone."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Logprobs = Sequence[dict[int, Logprob]]
"""A list, or a FlatLogprobs for SamplingParams(flat_logprobs=True)."""
PromptLogprobs = Sequence[dict[int, Logprob] | None]


@dataclass
class CompletionOutput:
    """One output of a prompt. `cumulative_logprob` and `logprobs` are None where they were not requested.

    `finish_reason` is stop or length; `stop_reason` the text or token id that stopped it, None at the model's own end.
    Adapters, experts and transfer parameters are None: there are none.
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
        """Tell whether it has ended: always."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A prompt and its outputs. `prompt` is None where token ids were given; of a chat it is the rendered template.

    Adapters, encoders and transfer parameters are None: there are none.
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
    """One hypothesis: its tokens and its text, both behind the prompt's, and the sum of its tokens' logarithms."""

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
    """What a model read out of one prompt."""

    data: list[float]

    def __repr__(self) -> str:
        """Return how long the vector is, which is long."""
        return f"PoolingOutput(data=[{len(self.data)} numbers])"


@dataclass
class PoolingRequestOutput:
    """A prompt and what was read out of it."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(repr=False)
class EmbeddingOutput:
    """A vector."""

    embedding: list[float]

    def __repr__(self) -> str:
        """Return how long the vector is, which is long."""
        return f"EmbeddingOutput(hidden_size={self.hidden_size})"

    @property
    def hidden_size(self) -> int:
        """How long the vector is."""
        return len(self.embedding)


@dataclass
class EmbeddingRequestOutput:
    """A prompt and its vector."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass
class ScoringOutput:
    """How alike two texts are."""

    score: float


@dataclass
class ScoringRequestOutput:
    """A pair and its score. `prompt_token_ids` are empty: the server says the score alone."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True
