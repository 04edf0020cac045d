"""Plain data that scheduler and instances exchange. Protobuf and pydantic types stay in the file that reads them."""

from dataclasses import dataclass, field
from enum import StrEnum

from wire.cheap_dataclass import cheap_dataclass
from wire.parameter_rules import MAX_COUNT, MAX_LISTED_TOKENS, MAX_LOGPROBS, Bounds, parameter, rule, rules_of

PROTOCOL_VERSION = 8


class Role(StrEnum):
    """What an instance is currently used for. A policy: every role runs the same program."""

    PREFILL = "prefill"
    DECODE = "decode"
    COMBINED = "combined"


class FinishReason(StrEnum):
    """Why a sequence finished. `stop`, `length` and `repetition` are successful reasons."""

    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """A sequence finishes when its outputs end with one pattern repeated `min_count` times without a gap.

    Patterns have from `min_pattern_size` to `max_pattern_size` tokens.
    """

    max_pattern_size: int
    min_pattern_size: int
    min_count: int


@dataclass(frozen=True, slots=True)
class Thinking:
    """The thinking before a sequence's answer: tokens between the two markers, limited to `budget` (None: no limit).

    `is_open`: the outputs begin within it, after `num_before` tokens of it at the end of the prompt. A structured
    output begins after it.
    """

    start_token_id: int
    end_token_id: int
    is_open: bool = False
    num_before: int = 0
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The constraint on the output's text. Text only, so that every instance can compile it.

    `kind` is json (value: a JSON schema), json_object (value: ""), regex, choice (value: a JSON list of strings),
    grammar (value: EBNF or Lark) or structural_tag (value: its JSON). `backend` names the compiler; `auto` is the first
    one that supports it. `whitespace_pattern` is a regex for whitespace between JSON tokens; None: the backend's own.
    """

    kind: str
    value: str
    whitespace_pattern: str | None = None
    backend: str = "auto"


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Beam search as transformers does it; the width is the params' `num_beams`.

    A hypothesis' score is the sum of its log probabilities divided by its length ** `length_penalty`. The search ends,
    with `early_stopping` True, when `n` hypotheses are done; False, when no live beam can do better by its current
    score; "never", when none can at any length.
    """

    length_penalty: float = parameter(1.0, Bounds(-100, 100))
    early_stopping: bool | str = False


@cheap_dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the engine chooses tokens. Stop strings are not included: the scheduler checks the text.

    temperature 0 is greedy. top_k -1 is off. `seed` is always set (the scheduler draws one). `stop_token_ids` already
    contains the model's end-of-sequence ids unless the request ignores them; `min_tokens` bans all of them until
    reached. `max_tokens` counts output tokens and is always set.

    `best_of` sequences are generated; the client gets the `n` with the highest log probability (None: n).
    `allowed_token_ids` and `bad_words` (each the ids of one word) are off when empty. `logprobs` and `prompt_logprobs`
    are how many of the best tokens to return at each position besides the actual one: 0 returns only that one, None
    nothing. `logprob_token_ids` replace the best tokens at output positions, and the lists of
    `prompt_logprob_token_ids` (one list for each position) those at the last positions of the prompt.
    `repetition_detection` is off if None.
    """

    max_tokens: int = field(metadata=rule(Bounds(1), Bounds(1, MAX_COUNT)))
    temperature: float = parameter(1.0, Bounds(0, 2), instance=Bounds(0, 100), with_beams=0, model_sets=True)
    top_k: int = parameter(-1, Bounds(-1), instance=Bounds(-1, MAX_COUNT), with_beams=-1, model_sets=True)
    top_p: float = parameter(1.0, Bounds(0, 1, above=True), with_beams=1, model_sets=True)
    min_p: float = parameter(0.0, Bounds(0, 1), with_beams=0, model_sets=True)
    seed: int = parameter(0, Bounds(-(2**63), 2**63 - 1), instance=Bounds(0, 2**64 - 1))
    n: int = parameter(1, Bounds(1), instance=Bounds(1, 1024))
    min_tokens: int = parameter(0, Bounds(0), instance=Bounds(0, MAX_COUNT))
    stop_token_ids: tuple[int, ...] = parameter((), Bounds(0, 128), instance=Bounds(0, 1024))
    best_of: int | None = parameter(None, Bounds(1), instance=Bounds(1, 1024))
    repetition_penalty: float = parameter(1.0, Bounds(0.01, 100), model_sets=True)
    presence_penalty: float = parameter(0.0, Bounds(-2, 2))
    frequency_penalty: float = parameter(0.0, Bounds(-2, 2))
    logit_bias: tuple[tuple[int, float], ...] = parameter((), Bounds(0, MAX_LISTED_TOKENS))
    allowed_token_ids: tuple[int, ...] = parameter((), Bounds(0, MAX_LISTED_TOKENS))
    bad_words: tuple[tuple[int, ...], ...] = parameter((), Bounds(0, 128), instance=Bounds(0, 1024))
    logprobs: int | None = parameter(None, Bounds(-1), instance=Bounds(0, MAX_LOGPROBS))
    prompt_logprobs: int | None = parameter(None, Bounds(-1), instance=Bounds(0, MAX_LOGPROBS))
    structured: StructuredOutput | None = None
    beam_search: BeamSearch | None = None
    logprob_token_ids: tuple[int, ...] = parameter((), Bounds(0, 128))  # as vLLM's
    repetition_detection: RepetitionDetection | None = None
    thinking: Thinking | None = None
    prompt_logprob_token_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def wanted_logprobs(self) -> "int | tuple[int, ...]":
        """Number or ids of the tokens whose log probabilities are returned at each output position."""
        return self.logprob_token_ids or self.logprobs or 0

    def wanted_at(self, position: int, num_tokens: int) -> "int | tuple[int, ...]":
        """Return the same as `wanted_logprobs`, for a position of a prompt with `num_tokens` tokens."""
        lists = self.prompt_logprob_token_ids
        at = position - num_tokens + len(lists)
        return lists[at] if at >= 0 and lists else self.prompt_logprobs or 0

    @property
    def num_sequences(self) -> int:
        """Sequences that the engine reports: with beam search the `n` hypotheses, else all that are generated."""
        return self.n if self.beam_search is not None else max(self.n, self.best_of or 0)

    @property
    def width(self) -> int:
        """Sequences that run at once, each with its own batch slot and blocks."""
        return self.num_beams if self.beam_search is not None else self.num_sequences

    @property
    def num_beams(self) -> int:
        """Width of the beam search."""
        return max(self.n, self.best_of or 0)


PARAMETERS = rules_of(SamplingParams, BeamSearch)
"""The rules of the sampling parameters by name."""
WITH_BEAMS = {name: rule.with_beams for name, rule in PARAMETERS.items() if rule.with_beams is not None}
"""The only values that beam search allows, by name."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """Options of a pooling request, which generates no text: one vector, or one value per class.

    `kind` is embed or classify; with token_embed or token_classify, each token has a vector or a value per class.
    `how` is the pooling method: last, mean, cls (the first token's state), or empty for the model's default.
    `dimensions` truncates the vectors; None keeps all. `normalize` scales vectors to length 1 and turns the logits of
    classes into probabilities; None is the model's default. Tokens from `second_text` on are the second text of a
    pair; None for a single text.
    """

    kind: str = "embed"
    how: str = ""
    normalize: bool | None = None
    dimensions: int | None = None
    second_text: int | None = None

    @property
    def of_tokens(self) -> bool:
        """Whether the result has values for each token, one token after another."""
        return self.kind.startswith("token_")


@dataclass(slots=True)  # not frozen: every token has one, and a frozen one takes five times as long to create
class TokenLogprobs:
    """Log probabilities (natural, of the raw logits in float32) at one position.

    `logprob` and `rank` (1 is the most likely) are those of the actual token; `top_ids` are the most likely tokens,
    best first, `top_logprobs` their values.
    """

    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Beam:
    """A hypothesis of a beam search: its output ids and the sum of their log probabilities.

    A `done` hypothesis has finished, by the stop token `stop_token_id`, the last of its ids, or by its length.
    `logprobs` has an entry for each id if the request has log probabilities, else none.
    """

    token_ids: tuple[int, ...]
    score: float
    done: bool = False
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in a prompt: the tokens [start, start + count) stand for it.

    `digest` is a sha256 over all that its embeddings depend on: the file, the processor's settings, the model and the
    tenant. `grid` is its extent in time, height and width, in tokens; (1, 1, count) where the model has no use for it.
    `data` is the image file, or its embeddings if `dtype` names their type: count rows, little-endian. It is there only
    on the way to the instance that computes the prompt, and comparisons of images ignore it.
    """

    start: int
    count: int
    digest: bytes
    grid: tuple[int, int, int]
    data: bytes = field(default=b"", repr=False, compare=False)
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class WorkerChat:
    """A conversation with images, for workers of other engines: they render it, and compute the images, themselves.

    `json` has the fields of a body of /v1/chat/completions, cut where the data URL of each image belongs. `images` are
    the media types and files.
    """

    json: tuple[bytes, ...] = field(repr=False)
    images: tuple[tuple[str, bytes], ...] = field(repr=False)


@cheap_dataclass(frozen=True, slots=True)
class ResumableStream:
    """What another scheduler needs to continue a prompt's answer; the instance that decodes the prompt keeps it.

    `stream_id` is 32 hex digits, random, and made by a scheduler. `tenant` is the owner of the API key that may resume
    it. `request` is the HTTP request, opaque to instances. `owner_epoch` is raised by each retry and each adoption.
    """

    stream_id: str
    tenant: str
    request: bytes = field(repr=False)
    owner_epoch: int = 0


@cheap_dataclass(frozen=True, slots=True)
class PromptState:
    """A prompt and its sequences so far: all that an instance needs to admit it.

    `outputs[i]` are the output token ids of sequence i; empty tuple = nothing sampled yet. A beam search uses `beams`
    instead, live and done ones, empty before its first step. With `pooling` nothing is generated: the result is the
    values of its kind. Commit, retry and resume carry this state; all else is rebuilt from it. Prompts with different
    `cache_salt` never share cached KV. `images` ascend and do not overlap. `traceparent` and `chat` go to workers of
    other engines only; `chat` is what they get in place of the ids. `gap_limit_s` is the longest gap that computing
    other prompts may cause between its tokens; 0: the instance's own limit.
    With `stream` it outlives its scheduler's session and may be adopted; it has one sequence, and no commit carries it.
    """

    prompt_id: str
    request_id: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    outputs: tuple[tuple[int, ...], ...] = ()
    probe: bool = False
    cache_salt: str = ""
    beams: tuple[Beam, ...] = ()
    pooling: Pooling | None = None
    traceparent: str = ""
    images: tuple[PromptImage, ...] = ()
    chat: WorkerChat | None = None
    gap_limit_s: float = 0.0
    stream: ResumableStream | None = None


@dataclass(frozen=True, slots=True)
class KvEndpoint:
    """Where an instance listens for KV over one transport.

    For transports within one host, `address` is an abstract Unix socket name (without the leading NUL) and `host_id`
    the boot id of the host and its network namespace; for all others, `address` is the listener's "host:port" and
    `host_id` is empty. `rank` is the rank of the instance that listens there.
    """

    transport: str
    address: str
    host_id: str = ""
    rank: int = 0


@cheap_dataclass(frozen=True, slots=True)
class Ticket:
    """The right to hand one prompt's KV into reserved blocks of one instance.

    `ticket_id` is 32 hex digits, random. `epoch` is the receiver's process epoch. Tokens [first_token, num_tokens)
    must be sent; the receiver already has those before.
    """

    ticket_id: str
    epoch: int
    instance_id: str
    num_tokens: int
    first_token: int
    lease_s: float
    endpoints: tuple[KvEndpoint, ...]


@dataclass(slots=True)  # not frozen, for the reason given at TokenLogprobs
class TokenOutput:
    """One new token of one sequence. `index` is its output position, from 0.

    `finish` is set on the last one. A sequence that ends without a token (cancelled, failed) has token_id None.
    """

    prompt_id: str
    sequence: int
    index: int
    token_id: int | None
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: TokenLogprobs | None = None


@cheap_dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of a prompt's tokens [start, start + len(tokens)); None for token 0, which has no context."""

    prompt_id: str
    start: int
    tokens: tuple[TokenLogprobs | None, ...]


@cheap_dataclass(frozen=True, slots=True)
class StageTimes:
    """Durations of one prompt's stages in seconds, each measured where it runs, None where it did not run.

    P had sent `kv_bytes_early` of the `kv_bytes` before it had computed the prompt: the part hidden by the overlap.
    The KV of `cached_tokens` of the prompt was cached and not computed, that of `written_tokens` was added to the cache
    (0 for workers of other engines). A full pool preempted the prompt `num_swaps` times with copies of its KV, and
    `num_rebuilds` times with KV to recompute.
    """

    queue_s: float | None = None
    reserve_s: float | None = None
    prefill_s: float | None = None
    send_s: float | None = None
    first_step_s: float | None = None
    kv_bytes: int = 0
    transport: str = ""
    kv_bytes_early: int = 0
    cached_tokens: int = 0
    num_swaps: int = 0
    num_rebuilds: int = 0
    encode_s: float | None = None
    written_tokens: int = 0


STAGES = ("queue", "reserve", "encode", "prefill", "send", "first_step")
"""The stages of StageTimes, in their order; `encode` is the wait for the embeddings of the prompt's images."""
