"""Plain data that scheduler and instances exchange. No protobuf and no pydantic type leaves the file that reads it."""

from dataclasses import dataclass, field
from enum import StrEnum

from wire.kv_layout import KvTensor

PROTOCOL_VERSION = 2


class Role(StrEnum):
    """What an instance is used for now. Policy, not a binary."""

    PREFILL = "prefill"
    DECODE = "decode"
    COMBINED = "combined"


class FinishReason(StrEnum):
    """How a sequence ended. `stop` and `length` are good endings."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the engine chooses tokens. Stop strings are not here: the scheduler sees the text.

    temperature 0 is greedy. top_k -1 is off. `seed` is always set (the scheduler draws one). `stop_token_ids` already
    contains the model's end-of-sequence ids unless the request ignores them; `min_tokens` bans all of them until
    reached. `max_tokens` counts output tokens and is always set.
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


@dataclass(frozen=True, slots=True)
class PromptState:
    """A prompt and its sequences so far: all that is needed to admit it anywhere.

    `outputs[i]` are the output token ids of sequence i; empty tuple = nothing sampled yet. This is what commit,
    retry and resume carry; all else is rebuilt from it.
    """

    prompt_id: str
    request_id: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    outputs: tuple[tuple[int, ...], ...] = ()
    probe: bool = False


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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Durations of one prompt's stages in seconds, each measured where it happens, None where it did not.

    `kv_bytes_early` of the `kv_bytes` had left P before the prompt was computed: what the overlap hid.
    """

    queue_s: float | None = None
    reserve_s: float | None = None
    prefill_s: float | None = None
    send_s: float | None = None
    first_step_s: float | None = None
    kv_bytes: int = 0
    transport: str = ""
    kv_bytes_early: int = 0


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


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """What an instance says about itself, with every step and heartbeat.

    Blocks in use are held by a sequence or a ticket; `blocks_probe` of them by probes. `uncomputed_tokens` are prompt
    tokens accepted and not yet computed. `progress_age_s` is how long ago the engine loop last turned or finished a
    layer.
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
