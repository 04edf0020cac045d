"""Plain data that scheduler and instances exchange. No protobuf and no pydantic type leaves the file that reads it."""

from dataclasses import dataclass, field
from enum import StrEnum

from wire.kv_layout import KvTensor

PROTOCOL_VERSION = 4
STEP_TOKEN_EDGES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Role(StrEnum):
    """What an instance is used for now. Policy, not a binary."""

    PREFILL = "prefill"
    DECODE = "decode"
    COMBINED = "combined"


class FinishReason(StrEnum):
    """How a sequence ended. `stop`, `length` and `repetition` are good endings."""

    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """A sequence finishes when its outputs end with one pattern `min_count` times, one behind the other.

    Patterns have from `min_pattern_size` to `max_pattern_size` tokens.
    """

    max_pattern_size: int
    min_pattern_size: int
    min_count: int


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What the output's text must be. Text only, so that every instance can compile it anew.

    `kind` is json (value: a JSON schema), json_object (value: ""), regex, choice (value: a JSON list of texts),
    grammar (value: EBNF or Lark) or structural_tag (value: its JSON). `backend` names who compiles it, `auto` the
    first that can. `whitespace_pattern` is a regex of what may stand between JSON's parts, None the backend's own.
    """

    kind: str
    value: str
    whitespace_pattern: str | None = None
    backend: str = "auto"


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Beam search as transformers does it; the width is the params' `num_beams`.

    A hypothesis scores the sum of its log probabilities over its length ** `length_penalty`. `early_stopping`: True
    ends when `n` hypotheses are done, False when no live beam can do better by its current score, "never" when none
    can at any length.
    """

    length_penalty: float = 1.0
    early_stopping: bool | str = False


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the engine chooses tokens. Stop strings are not here: the scheduler sees the text.

    temperature 0 is greedy. top_k -1 is off. `seed` is always set (the scheduler draws one). `stop_token_ids` already
    contains the model's end-of-sequence ids unless the request ignores them; `min_tokens` bans all of them until
    reached. `max_tokens` counts output tokens and is always set.

    `best_of` sequences are generated of which the client gets the `n` likeliest (None: n). `allowed_token_ids` and
    `bad_words` (each the ids of one word) are off when empty. `logprobs` and `prompt_logprobs` are how many of the best
    tokens are returned at each position beside the one that is there; 0 returns that one alone, None nothing. With
    `logprob_token_ids` an output position has those in place of the best; `repetition_detection` None detects nothing.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    n: int = 1
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    best_of: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: StructuredOutput | None = None
    beam_search: BeamSearch | None = None
    logprob_token_ids: tuple[int, ...] = ()
    repetition_detection: RepetitionDetection | None = None

    @property
    def wanted_logprobs(self) -> "int | tuple[int, ...]":
        """How many of the best tokens, or which ones, have log probabilities at each output position."""
        return self.logprob_token_ids or self.logprobs or 0

    @property
    def num_sequences(self) -> int:
        """Sequences that the engine tells of: with beams the `n` hypotheses, else all that are generated."""
        return self.n if self.beam_search is not None else max(self.n, self.best_of or 0)

    @property
    def width(self) -> int:
        """Sequences that run at once, each with a seat in the step and blocks of its own."""
        return self.num_beams if self.beam_search is not None else self.num_sequences

    @property
    def num_beams(self) -> int:
        """Width of the beam search."""
        return max(self.n, self.best_of or 0)


@dataclass(frozen=True, slots=True)
class Pooling:
    """What is wanted of a prompt in place of text: one vector, or with a cross-encoder one score.

    `kind` is embed or score. `how` the hidden states become one: last, mean or cls (the first token's); empty: as the
    model says. `dimensions` are the first so many of the vector, None all; `normalize` gives it length 1, None as the
    model says. Tokens from `second_text` on are the second text of a pair, None where there is one text.
    """

    kind: str = "embed"
    how: str = ""
    normalize: bool | None = None
    dimensions: int | None = None
    second_text: int | None = None


@dataclass(slots=True)  # not frozen, as every token has one: to make it would take five times as long
class TokenLogprobs:
    """Log probabilities (natural, of the raw logits in float32) at one position.

    `logprob` and `rank` (1 is the likeliest) are those of the token that is there; `top_ids` are the likeliest tokens,
    best first, `top_logprobs` theirs.
    """

    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Beam:
    """A hypothesis of a beam search: its output ids and the sum of their log probabilities.

    A `done` one has ended, by the stop token `stop_token_id`, which is the last of its ids, or by its length.
    """

    token_ids: tuple[int, ...]
    score: float
    done: bool = False
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class PromptState:
    """A prompt and its sequences so far: all that is needed to admit it anywhere.

    `outputs[i]` are the output token ids of sequence i; empty tuple = nothing sampled yet. A beam search has `beams` in
    their place, those that live and those that are done, empty before its first step. With `pooling` nothing is
    generated: the answer is what it asks for. This is what commit,
    retry and resume carry; all else is rebuilt from it. Prompts of unlike `cache_salt` never share cached KV.
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


@dataclass(frozen=True, slots=True)
class KvEndpoint:
    """Where an instance listens for KV over one transport.

    shm, cuda_ipc: `address` is an abstract Unix socket name (without the leading NUL) and `host_id` the boot id of the
    host and its network namespace; all others: `address` is "host:port" of the listener where the link begins. `rank`
    is the rank of the instance that listens there.
    """

    transport: str
    address: str
    host_id: str = ""
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to hand one prompt's KV into reserved blocks of one instance.

    `ticket_id` is 32 hex digits, random. `epoch` is the receiver's process epoch. Tokens [first_token, num_tokens)
    are wanted; what lies before, the receiver already holds.
    """

    ticket_id: str
    epoch: int
    instance_id: str
    num_tokens: int
    first_token: int
    lease_s: float
    endpoints: tuple[KvEndpoint, ...]


@dataclass(slots=True)  # not frozen, as TokenLogprobs
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


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of a prompt's tokens [start, start + len(tokens)); None for token 0, which nothing precedes."""

    prompt_id: str
    start: int
    tokens: tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Durations of one prompt's stages in seconds, each measured where it happens, None where it did not.

    `kv_bytes_early` of the `kv_bytes` had left P before the prompt was computed: what the overlap hid. The KV of
    `cached_tokens` of the prompt was there already and was not computed. Between two of its tokens a full pool put it
    aside `num_swaps` times with copies of its KV, and `num_rebuilds` times to compute that again.
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


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What two processes compare before they work together. Digests are hex sha256 prefixes of 16 digits."""

    name: str
    weights_digest: str
    tokenizer_digest: str


@dataclass(frozen=True, slots=True)
class InstanceDescription:
    """What an instance is; fixed for the life of its process (`epoch` is random per process).

    `kv_digests`: whether it wants every KV frame checked; a link goes without only where both ends do not.
    `kv_transports` are all there are, best first, as `shm`; one it does not offer with the reason, as `shm: not named`.
    """

    instance_id: str
    epoch: int
    server_ip: str
    device_ids: tuple[str, ...]
    host: str
    port: int
    pid: int
    role: Role
    table_digest: str
    protocol_version: int
    model: ModelIdentity
    max_model_len: int
    vocab_size: int
    dtype: str
    block_size: int
    num_blocks: int
    kv_tensors: tuple[KvTensor, ...]
    prefill_chunk_size: int
    max_num_seqs: int
    endpoints: tuple[KvEndpoint, ...]
    device: str = "cpu"
    kv_digests: bool = True
    kv_transports: tuple[str, ...] = ()


@dataclass(slots=True)  # not frozen, as TokenLogprobs
class LoadSnapshot:
    """What an instance says about itself, with every step and heartbeat.

    Blocks in use are held by a sequence or a ticket; `blocks_probe` of them by probes. `uncomputed_tokens` are prompt
    tokens accepted and not yet computed. `progress_age_s` is how long ago the engine loop last turned or finished a
    layer, in seconds in which the process could run; `slowest_turn_s` is the longest that it lately took for that, or
    that one of the prompt tokens in hand may take. `starved_s` is how long the machine kept the process from running
    since it began.
    `prefix_tokens_sought` were looked for among blocks computed before, `prefix_tokens_found` were there.
    `blocks_swapped` of preempted sequences have copies outside the pool. Of all `steps`, which computed
    `tokens_computed`, so many as `step_tokens` says had at most STEP_TOKEN_EDGES tokens each and more than the edge
    before; the last had more than all.
    """

    blocks_total: int
    blocks_used: int
    blocks_probe: int
    blocks_cached: int
    running: int
    waiting: int
    uncomputed_tokens: int
    held_prompts: int
    progress_age_s: float
    steps: int = 0
    step_seconds: float = 0.0
    kv_bytes_sent: int = 0
    kv_bytes_received: int = 0
    preemptions: int = 0
    kv_frames_corrupt: int = 0
    kv_frames_resent: int = 0
    kv_frames_dropped: int = 0
    kv_frames_duplicate: int = 0
    kv_links_refused: int = 0
    prefix_tokens_sought: int = 0
    prefix_tokens_found: int = 0
    blocks_swapped: int = 0
    tokens_computed: int = 0
    slowest_turn_s: float = 0.0
    starved_s: float = 0.0
    step_tokens: tuple[int, ...] = ()
    links: tuple["LinkStatus", ...] = field(default=())


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """The sender's view of the links to one peer.

    `transport` is the one in use. `passed_over` says in words, one text a transport, why no better one is. Round trip
    and bandwidth are of the last measurement, 0 where none was made. `failures` counts lost links, `fallbacks` the
    times that a worse transport had to do.
    """

    peer_id: str
    transport: str
    state: str
    epoch: int
    bytes_sent: int
    failures: int
    fallbacks: int = 0
    round_trip_s: float = 0.0
    bytes_per_s: float = 0.0
    passed_over: tuple[str, ...] = ()
