from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChallengeRequest(_message.Message):
    __slots__ = ("nonce", "fingerprint", "host")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    fingerprint: str
    host: str
    def __init__(self, nonce: _Optional[bytes] = ..., fingerprint: _Optional[str] = ..., host: _Optional[str] = ...) -> None: ...

class ChallengeReply(_message.Message):
    __slots__ = ("nonce", "proof", "fingerprint", "host")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    proof: bytes
    fingerprint: str
    host: str
    def __init__(self, nonce: _Optional[bytes] = ..., proof: _Optional[bytes] = ..., fingerprint: _Optional[str] = ..., host: _Optional[str] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KvTensor(_message.Message):
    __slots__ = ("layer", "name", "heads", "head_dim", "dtype")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    layer: int
    name: str
    heads: int
    head_dim: int
    dtype: str
    def __init__(self, layer: _Optional[int] = ..., name: _Optional[str] = ..., heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class KvEndpoint(_message.Message):
    __slots__ = ("transport", "address", "host_id", "rank")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    transport: str
    address: str
    host_id: str
    rank: int
    def __init__(self, transport: _Optional[str] = ..., address: _Optional[str] = ..., host_id: _Optional[str] = ..., rank: _Optional[int] = ...) -> None: ...

class InstanceDescription(_message.Message):
    __slots__ = ("instance_id", "epoch", "server_ip", "device_ids", "host", "port", "pid", "role", "table_digest", "protocol_version", "model_name", "weights_digest", "tokenizer_digest", "max_model_len", "vocab_size", "dtype", "block_size", "num_blocks", "kv_tensors", "prefill_chunk_size", "max_num_seqs", "endpoints", "device", "kv_digests", "kv_transports", "reuse_decoded")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SERVER_IP_FIELD_NUMBER: _ClassVar[int]
    DEVICE_IDS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TABLE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_TENSORS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CHUNK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    KV_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    REUSE_DECODED_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    epoch: int
    server_ip: str
    device_ids: _containers.RepeatedScalarFieldContainer[str]
    host: str
    port: int
    pid: int
    role: str
    table_digest: str
    protocol_version: int
    model_name: str
    weights_digest: str
    tokenizer_digest: str
    max_model_len: int
    vocab_size: int
    dtype: str
    block_size: int
    num_blocks: int
    kv_tensors: _containers.RepeatedCompositeFieldContainer[KvTensor]
    prefill_chunk_size: int
    max_num_seqs: int
    endpoints: _containers.RepeatedCompositeFieldContainer[KvEndpoint]
    device: str
    kv_digests: bool
    kv_transports: _containers.RepeatedScalarFieldContainer[str]
    reuse_decoded: bool
    def __init__(self, instance_id: _Optional[str] = ..., epoch: _Optional[int] = ..., server_ip: _Optional[str] = ..., device_ids: _Optional[_Iterable[str]] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., pid: _Optional[int] = ..., role: _Optional[str] = ..., table_digest: _Optional[str] = ..., protocol_version: _Optional[int] = ..., model_name: _Optional[str] = ..., weights_digest: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., kv_tensors: _Optional[_Iterable[_Union[KvTensor, _Mapping]]] = ..., prefill_chunk_size: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., endpoints: _Optional[_Iterable[_Union[KvEndpoint, _Mapping]]] = ..., device: _Optional[str] = ..., kv_digests: _Optional[bool] = ..., kv_transports: _Optional[_Iterable[str]] = ..., reuse_decoded: _Optional[bool] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "n", "min_tokens", "stop_token_ids", "best_of", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words", "logprobs", "prompt_logprobs", "structured", "beam_search", "logprob_token_ids", "repetition_detection", "thinking", "prompt_logprob_token_ids")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BEST_OF_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_FIELD_NUMBER: _ClassVar[int]
    BEAM_SEARCH_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_DETECTION_FIELD_NUMBER: _ClassVar[int]
    THINKING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    n: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    best_of: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[TokenBias]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[Output]
    logprobs: int
    prompt_logprobs: int
    structured: StructuredOutput
    beam_search: BeamSearch
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    repetition_detection: RepetitionDetection
    thinking: Thinking
    prompt_logprob_token_ids: _containers.RepeatedCompositeFieldContainer[Output]
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., n: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., best_of: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[TokenBias, _Mapping]]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[Output, _Mapping]]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., structured: _Optional[_Union[StructuredOutput, _Mapping]] = ..., beam_search: _Optional[_Union[BeamSearch, _Mapping]] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ..., repetition_detection: _Optional[_Union[RepetitionDetection, _Mapping]] = ..., thinking: _Optional[_Union[Thinking, _Mapping]] = ..., prompt_logprob_token_ids: _Optional[_Iterable[_Union[Output, _Mapping]]] = ...) -> None: ...

class Thinking(_message.Message):
    __slots__ = ("start_token_id", "end_token_id", "is_open", "num_before", "budget")
    START_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    IS_OPEN_FIELD_NUMBER: _ClassVar[int]
    NUM_BEFORE_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    start_token_id: int
    end_token_id: int
    is_open: bool
    num_before: int
    budget: int
    def __init__(self, start_token_id: _Optional[int] = ..., end_token_id: _Optional[int] = ..., is_open: _Optional[bool] = ..., num_before: _Optional[int] = ..., budget: _Optional[int] = ...) -> None: ...

class RepetitionDetection(_message.Message):
    __slots__ = ("max_pattern_size", "min_pattern_size", "min_count")
    MAX_PATTERN_SIZE_FIELD_NUMBER: _ClassVar[int]
    MIN_PATTERN_SIZE_FIELD_NUMBER: _ClassVar[int]
    MIN_COUNT_FIELD_NUMBER: _ClassVar[int]
    max_pattern_size: int
    min_pattern_size: int
    min_count: int
    def __init__(self, max_pattern_size: _Optional[int] = ..., min_pattern_size: _Optional[int] = ..., min_count: _Optional[int] = ...) -> None: ...

class TokenBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class StructuredOutput(_message.Message):
    __slots__ = ("kind", "value", "whitespace_pattern", "backend")
    KIND_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    WHITESPACE_PATTERN_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    kind: str
    value: str
    whitespace_pattern: str
    backend: str
    def __init__(self, kind: _Optional[str] = ..., value: _Optional[str] = ..., whitespace_pattern: _Optional[str] = ..., backend: _Optional[str] = ...) -> None: ...

class BeamSearch(_message.Message):
    __slots__ = ("length_penalty", "early_stopping")
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    length_penalty: float
    early_stopping: str
    def __init__(self, length_penalty: _Optional[float] = ..., early_stopping: _Optional[str] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "rank", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    rank: int
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PromptState(_message.Message):
    __slots__ = ("prompt_id", "request_id", "token_ids", "params", "outputs", "probe", "cache_salt", "beams", "pooling", "images", "gap_limit_s", "stream")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    BEAMS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    GAP_LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    params: SamplingParams
    outputs: _containers.RepeatedCompositeFieldContainer[Output]
    probe: bool
    cache_salt: str
    beams: _containers.RepeatedCompositeFieldContainer[Beam]
    pooling: Pooling
    images: _containers.RepeatedCompositeFieldContainer[PromptImage]
    gap_limit_s: float
    stream: ResumableStream
    def __init__(self, prompt_id: _Optional[str] = ..., request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., params: _Optional[_Union[SamplingParams, _Mapping]] = ..., outputs: _Optional[_Iterable[_Union[Output, _Mapping]]] = ..., probe: _Optional[bool] = ..., cache_salt: _Optional[str] = ..., beams: _Optional[_Iterable[_Union[Beam, _Mapping]]] = ..., pooling: _Optional[_Union[Pooling, _Mapping]] = ..., images: _Optional[_Iterable[_Union[PromptImage, _Mapping]]] = ..., gap_limit_s: _Optional[float] = ..., stream: _Optional[_Union[ResumableStream, _Mapping]] = ...) -> None: ...

class ResumableStream(_message.Message):
    __slots__ = ("stream_id", "tenant", "request", "owner_epoch")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    OWNER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    stream_id: str
    tenant: str
    request: bytes
    owner_epoch: int
    def __init__(self, stream_id: _Optional[str] = ..., tenant: _Optional[str] = ..., request: _Optional[bytes] = ..., owner_epoch: _Optional[int] = ...) -> None: ...

class PromptImage(_message.Message):
    __slots__ = ("start", "count", "digest", "grid", "data_bytes", "dtype")
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    DATA_BYTES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    start: int
    count: int
    digest: bytes
    grid: _containers.RepeatedScalarFieldContainer[int]
    data_bytes: int
    dtype: str
    def __init__(self, start: _Optional[int] = ..., count: _Optional[int] = ..., digest: _Optional[bytes] = ..., grid: _Optional[_Iterable[int]] = ..., data_bytes: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class Pooling(_message.Message):
    __slots__ = ("kind", "how", "normalize", "dimensions", "second_text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    HOW_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    SECOND_TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    how: str
    normalize: bool
    dimensions: int
    second_text: int
    def __init__(self, kind: _Optional[str] = ..., how: _Optional[str] = ..., normalize: _Optional[bool] = ..., dimensions: _Optional[int] = ..., second_text: _Optional[int] = ...) -> None: ...

class Beam(_message.Message):
    __slots__ = ("token_ids", "score", "done", "stop_token_id", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    score: float
    done: bool
    stop_token_id: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., score: _Optional[float] = ..., done: _Optional[bool] = ..., stop_token_id: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("ticket_id", "epoch", "instance_id", "num_tokens", "first_token", "lease_s", "endpoints")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    epoch: int
    instance_id: str
    num_tokens: int
    first_token: int
    lease_s: float
    endpoints: _containers.RepeatedCompositeFieldContainer[KvEndpoint]
    def __init__(self, ticket_id: _Optional[str] = ..., epoch: _Optional[int] = ..., instance_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., first_token: _Optional[int] = ..., lease_s: _Optional[float] = ..., endpoints: _Optional[_Iterable[_Union[KvEndpoint, _Mapping]]] = ...) -> None: ...

class LinkStatus(_message.Message):
    __slots__ = ("peer_id", "transport", "state", "epoch", "bytes_sent", "failures", "fallbacks", "round_trip_s", "bytes_per_s", "passed_over")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    PASSED_OVER_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    transport: str
    state: str
    epoch: int
    bytes_sent: int
    failures: int
    fallbacks: int
    round_trip_s: float
    bytes_per_s: float
    passed_over: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, peer_id: _Optional[str] = ..., transport: _Optional[str] = ..., state: _Optional[str] = ..., epoch: _Optional[int] = ..., bytes_sent: _Optional[int] = ..., failures: _Optional[int] = ..., fallbacks: _Optional[int] = ..., round_trip_s: _Optional[float] = ..., bytes_per_s: _Optional[float] = ..., passed_over: _Optional[_Iterable[str]] = ...) -> None: ...

class LoadSnapshot(_message.Message):
    __slots__ = ("blocks_total", "blocks_used", "blocks_probe", "blocks_cached", "running", "waiting", "uncomputed_tokens", "held_prompts", "progress_age_s", "steps", "step_seconds", "kv_bytes_sent", "kv_bytes_received", "preemptions", "links", "kv_frames_corrupt", "kv_frames_resent", "kv_frames_dropped", "kv_frames_duplicate", "kv_links_refused", "prefix_tokens_sought", "prefix_tokens_found", "blocks_swapped", "tokens_computed", "step_tokens", "slowest_turn_s", "starved_s", "prompts_recomputed", "images_waiting", "image_cache_bytes", "images_sought", "images_found", "images_encoded", "decoding", "step_base_s", "step_sequence_s", "step_token_s", "gap_limit_s", "prefix_tokens_found_decoded")
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PROBE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    UNCOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_AGE_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    KV_FRAMES_CORRUPT_FIELD_NUMBER: _ClassVar[int]
    KV_FRAMES_RESENT_FIELD_NUMBER: _ClassVar[int]
    KV_FRAMES_DROPPED_FIELD_NUMBER: _ClassVar[int]
    KV_FRAMES_DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    KV_LINKS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_SOUGHT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FOUND_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_SWAPPED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLOWEST_TURN_S_FIELD_NUMBER: _ClassVar[int]
    STARVED_S_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    IMAGES_WAITING_FIELD_NUMBER: _ClassVar[int]
    IMAGE_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    IMAGES_SOUGHT_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FOUND_FIELD_NUMBER: _ClassVar[int]
    IMAGES_ENCODED_FIELD_NUMBER: _ClassVar[int]
    DECODING_FIELD_NUMBER: _ClassVar[int]
    STEP_BASE_S_FIELD_NUMBER: _ClassVar[int]
    STEP_SEQUENCE_S_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    GAP_LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FOUND_DECODED_FIELD_NUMBER: _ClassVar[int]
    blocks_total: int
    blocks_used: int
    blocks_probe: int
    blocks_cached: int
    running: int
    waiting: int
    uncomputed_tokens: int
    held_prompts: int
    progress_age_s: float
    steps: int
    step_seconds: float
    kv_bytes_sent: int
    kv_bytes_received: int
    preemptions: int
    links: _containers.RepeatedCompositeFieldContainer[LinkStatus]
    kv_frames_corrupt: int
    kv_frames_resent: int
    kv_frames_dropped: int
    kv_frames_duplicate: int
    kv_links_refused: int
    prefix_tokens_sought: int
    prefix_tokens_found: int
    blocks_swapped: int
    tokens_computed: int
    step_tokens: _containers.RepeatedScalarFieldContainer[int]
    slowest_turn_s: float
    starved_s: float
    prompts_recomputed: int
    images_waiting: int
    image_cache_bytes: int
    images_sought: int
    images_found: int
    images_encoded: int
    decoding: int
    step_base_s: float
    step_sequence_s: float
    step_token_s: float
    gap_limit_s: float
    prefix_tokens_found_decoded: int
    def __init__(self, blocks_total: _Optional[int] = ..., blocks_used: _Optional[int] = ..., blocks_probe: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., uncomputed_tokens: _Optional[int] = ..., held_prompts: _Optional[int] = ..., progress_age_s: _Optional[float] = ..., steps: _Optional[int] = ..., step_seconds: _Optional[float] = ..., kv_bytes_sent: _Optional[int] = ..., kv_bytes_received: _Optional[int] = ..., preemptions: _Optional[int] = ..., links: _Optional[_Iterable[_Union[LinkStatus, _Mapping]]] = ..., kv_frames_corrupt: _Optional[int] = ..., kv_frames_resent: _Optional[int] = ..., kv_frames_dropped: _Optional[int] = ..., kv_frames_duplicate: _Optional[int] = ..., kv_links_refused: _Optional[int] = ..., prefix_tokens_sought: _Optional[int] = ..., prefix_tokens_found: _Optional[int] = ..., blocks_swapped: _Optional[int] = ..., tokens_computed: _Optional[int] = ..., step_tokens: _Optional[_Iterable[int]] = ..., slowest_turn_s: _Optional[float] = ..., starved_s: _Optional[float] = ..., prompts_recomputed: _Optional[int] = ..., images_waiting: _Optional[int] = ..., image_cache_bytes: _Optional[int] = ..., images_sought: _Optional[int] = ..., images_found: _Optional[int] = ..., images_encoded: _Optional[int] = ..., decoding: _Optional[int] = ..., step_base_s: _Optional[float] = ..., step_sequence_s: _Optional[float] = ..., step_token_s: _Optional[float] = ..., gap_limit_s: _Optional[float] = ..., prefix_tokens_found_decoded: _Optional[int] = ...) -> None: ...

class StageTimes(_message.Message):
    __slots__ = ("queue_s", "reserve_s", "prefill_s", "send_s", "first_step_s", "kv_bytes", "transport", "kv_bytes_early", "cached_tokens", "num_swaps", "num_rebuilds", "encode_s", "written_tokens")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    RESERVE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    SEND_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_S_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_EARLY_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPS_FIELD_NUMBER: _ClassVar[int]
    NUM_REBUILDS_FIELD_NUMBER: _ClassVar[int]
    ENCODE_S_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    reserve_s: float
    prefill_s: float
    send_s: float
    first_step_s: float
    kv_bytes: int
    transport: str
    kv_bytes_early: int
    cached_tokens: int
    num_swaps: int
    num_rebuilds: int
    encode_s: float
    written_tokens: int
    def __init__(self, queue_s: _Optional[float] = ..., reserve_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., send_s: _Optional[float] = ..., first_step_s: _Optional[float] = ..., kv_bytes: _Optional[int] = ..., transport: _Optional[str] = ..., kv_bytes_early: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., num_swaps: _Optional[int] = ..., num_rebuilds: _Optional[int] = ..., encode_s: _Optional[float] = ..., written_tokens: _Optional[int] = ...) -> None: ...

class TokenOutput(_message.Message):
    __slots__ = ("prompt_id", "sequence", "index", "token_id", "finish", "stop_token_id", "logprobs")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    sequence: int
    index: int
    token_id: int
    finish: str
    stop_token_id: int
    logprobs: TokenLogprobs
    def __init__(self, prompt_id: _Optional[str] = ..., sequence: _Optional[int] = ..., index: _Optional[int] = ..., token_id: _Optional[int] = ..., finish: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., logprobs: _Optional[_Union[TokenLogprobs, _Mapping]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("prompt_id", "start", "tokens")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    start: int
    tokens: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, prompt_id: _Optional[str] = ..., start: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class OpenSession(_message.Message):
    __slots__ = ("scheduler_id", "epoch", "lease_s", "orphan_s")
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    ORPHAN_S_FIELD_NUMBER: _ClassVar[int]
    scheduler_id: str
    epoch: int
    lease_s: float
    orphan_s: float
    def __init__(self, scheduler_id: _Optional[str] = ..., epoch: _Optional[int] = ..., lease_s: _Optional[float] = ..., orphan_s: _Optional[float] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("prompt",)
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    prompt: PromptState
    def __init__(self, prompt: _Optional[_Union[PromptState, _Mapping]] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("prompt", "ticket")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    prompt: PromptState
    ticket: Ticket
    def __init__(self, prompt: _Optional[_Union[PromptState, _Mapping]] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ...) -> None: ...

class Generate(_message.Message):
    __slots__ = ("prompt",)
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    prompt: PromptState
    def __init__(self, prompt: _Optional[_Union[PromptState, _Mapping]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("prompt_id", "sequence", "reason", "owner_epoch")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OWNER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    sequence: int
    reason: str
    owner_epoch: int
    def __init__(self, prompt_id: _Optional[str] = ..., sequence: _Optional[int] = ..., reason: _Optional[str] = ..., owner_epoch: _Optional[int] = ...) -> None: ...

class Adopt(_message.Message):
    __slots__ = ("stream_id", "tenant", "owner_epoch")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    OWNER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    stream_id: str
    tenant: str
    owner_epoch: int
    def __init__(self, stream_id: _Optional[str] = ..., tenant: _Optional[str] = ..., owner_epoch: _Optional[int] = ...) -> None: ...

class Adopted(_message.Message):
    __slots__ = ("prompt_id", "prompt", "num_sent")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_SENT_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    prompt: PromptState
    num_sent: int
    def __init__(self, prompt_id: _Optional[str] = ..., prompt: _Optional[_Union[PromptState, _Mapping]] = ..., num_sent: _Optional[int] = ...) -> None: ...

class ClaimRun(_message.Message):
    __slots__ = ("claim_id", "record_id", "tenant", "digest", "stream_id")
    CLAIM_ID_FIELD_NUMBER: _ClassVar[int]
    RECORD_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    claim_id: str
    record_id: str
    tenant: str
    digest: str
    stream_id: str
    def __init__(self, claim_id: _Optional[str] = ..., record_id: _Optional[str] = ..., tenant: _Optional[str] = ..., digest: _Optional[str] = ..., stream_id: _Optional[str] = ...) -> None: ...

class EndClaim(_message.Message):
    __slots__ = ("claim_id", "record_id", "tenant", "digest", "end", "answer")
    CLAIM_ID_FIELD_NUMBER: _ClassVar[int]
    RECORD_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    claim_id: str
    record_id: str
    tenant: str
    digest: str
    end: str
    answer: bytes
    def __init__(self, claim_id: _Optional[str] = ..., record_id: _Optional[str] = ..., tenant: _Optional[str] = ..., digest: _Optional[str] = ..., end: _Optional[str] = ..., answer: _Optional[bytes] = ...) -> None: ...

class Claimed(_message.Message):
    __slots__ = ("claim_id", "state", "stream_id", "answer")
    CLAIM_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    claim_id: str
    state: str
    stream_id: str
    answer: bytes
    def __init__(self, claim_id: _Optional[str] = ..., state: _Optional[str] = ..., stream_id: _Optional[str] = ..., answer: _Optional[bytes] = ...) -> None: ...

class MeasureLink(_message.Message):
    __slots__ = ("peer_id", "epoch", "endpoints", "num_bytes")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    epoch: int
    endpoints: _containers.RepeatedCompositeFieldContainer[KvEndpoint]
    num_bytes: int
    def __init__(self, peer_id: _Optional[str] = ..., epoch: _Optional[int] = ..., endpoints: _Optional[_Iterable[_Union[KvEndpoint, _Mapping]]] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class LinkMeasured(_message.Message):
    __slots__ = ("peer_id", "link", "error")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    link: LinkStatus
    error: str
    def __init__(self, peer_id: _Optional[str] = ..., link: _Optional[_Union[LinkStatus, _Mapping]] = ..., error: _Optional[str] = ...) -> None: ...

class SetRole(_message.Message):
    __slots__ = ("role", "epoch")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    role: str
    epoch: int
    def __init__(self, role: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class RoleHeld(_message.Message):
    __slots__ = ("role", "epoch", "answers", "error")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    role: str
    epoch: int
    answers: int
    error: str
    def __init__(self, role: _Optional[str] = ..., epoch: _Optional[int] = ..., answers: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class TableRead(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("load",)
    LOAD_FIELD_NUMBER: _ClassVar[int]
    load: LoadSnapshot
    def __init__(self, load: _Optional[_Union[LoadSnapshot, _Mapping]] = ...) -> None: ...

class SessionOpen(_message.Message):
    __slots__ = ("instance_id", "epoch", "load")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    epoch: int
    load: LoadSnapshot
    def __init__(self, instance_id: _Optional[str] = ..., epoch: _Optional[int] = ..., load: _Optional[_Union[LoadSnapshot, _Mapping]] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("prompt_id", "ticket", "seconds")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    ticket: Ticket
    seconds: float
    def __init__(self, prompt_id: _Optional[str] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ..., seconds: _Optional[float] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("prompt_id", "error", "message", "load", "param")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    error: str
    message: str
    load: LoadSnapshot
    param: str
    def __init__(self, prompt_id: _Optional[str] = ..., error: _Optional[str] = ..., message: _Optional[str] = ..., load: _Optional[_Union[LoadSnapshot, _Mapping]] = ..., param: _Optional[str] = ...) -> None: ...

class PromptTimes(_message.Message):
    __slots__ = ("prompt_id", "times")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    times: StageTimes
    def __init__(self, prompt_id: _Optional[str] = ..., times: _Optional[_Union[StageTimes, _Mapping]] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("tokens", "load", "times", "prompt_logprobs")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenOutput]
    load: LoadSnapshot
    times: _containers.RepeatedCompositeFieldContainer[PromptTimes]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    def __init__(self, tokens: _Optional[_Iterable[_Union[TokenOutput, _Mapping]]] = ..., load: _Optional[_Union[LoadSnapshot, _Mapping]] = ..., times: _Optional[_Iterable[_Union[PromptTimes, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ...) -> None: ...

class HandedOff(_message.Message):
    __slots__ = ("prompt_id", "times")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    times: StageTimes
    def __init__(self, prompt_id: _Optional[str] = ..., times: _Optional[_Union[StageTimes, _Mapping]] = ...) -> None: ...

class Pooled(_message.Message):
    __slots__ = ("prompt_id", "values", "times")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    values: _containers.RepeatedScalarFieldContainer[float]
    times: StageTimes
    def __init__(self, prompt_id: _Optional[str] = ..., values: _Optional[_Iterable[float]] = ..., times: _Optional[_Union[StageTimes, _Mapping]] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("prompt_id", "error", "message")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    error: str
    message: str
    def __init__(self, prompt_id: _Optional[str] = ..., error: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class CommandMessage(_message.Message):
    __slots__ = ("open", "reserve", "prefill", "generate", "cancel", "heartbeat", "measure_link", "image_piece", "set_role", "adopt", "claim", "end_claim", "more")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    MEASURE_LINK_FIELD_NUMBER: _ClassVar[int]
    IMAGE_PIECE_FIELD_NUMBER: _ClassVar[int]
    SET_ROLE_FIELD_NUMBER: _ClassVar[int]
    ADOPT_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    END_CLAIM_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    open: OpenSession
    reserve: Reserve
    prefill: Prefill
    generate: Generate
    cancel: Cancel
    heartbeat: Heartbeat
    measure_link: MeasureLink
    image_piece: bytes
    set_role: SetRole
    adopt: Adopt
    claim: ClaimRun
    end_claim: EndClaim
    more: _containers.RepeatedCompositeFieldContainer[CommandMessage]
    def __init__(self, open: _Optional[_Union[OpenSession, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ..., generate: _Optional[_Union[Generate, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., measure_link: _Optional[_Union[MeasureLink, _Mapping]] = ..., image_piece: _Optional[bytes] = ..., set_role: _Optional[_Union[SetRole, _Mapping]] = ..., adopt: _Optional[_Union[Adopt, _Mapping]] = ..., claim: _Optional[_Union[ClaimRun, _Mapping]] = ..., end_claim: _Optional[_Union[EndClaim, _Mapping]] = ..., more: _Optional[_Iterable[_Union[CommandMessage, _Mapping]]] = ...) -> None: ...

class EventMessage(_message.Message):
    __slots__ = ("session_open", "reserved", "refused", "step", "handed_off", "failed", "heartbeat", "link_measured", "pooled", "table_read", "role_held", "adopted", "claimed", "more")
    SESSION_OPEN_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HANDED_OFF_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LINK_MEASURED_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    TABLE_READ_FIELD_NUMBER: _ClassVar[int]
    ROLE_HELD_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    session_open: SessionOpen
    reserved: Reserved
    refused: Refused
    step: Step
    handed_off: HandedOff
    failed: Failed
    heartbeat: Heartbeat
    link_measured: LinkMeasured
    pooled: Pooled
    table_read: TableRead
    role_held: RoleHeld
    adopted: Adopted
    claimed: Claimed
    more: _containers.RepeatedCompositeFieldContainer[EventMessage]
    def __init__(self, session_open: _Optional[_Union[SessionOpen, _Mapping]] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., handed_off: _Optional[_Union[HandedOff, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., link_measured: _Optional[_Union[LinkMeasured, _Mapping]] = ..., pooled: _Optional[_Union[Pooled, _Mapping]] = ..., table_read: _Optional[_Union[TableRead, _Mapping]] = ..., role_held: _Optional[_Union[RoleHeld, _Mapping]] = ..., adopted: _Optional[_Union[Adopted, _Mapping]] = ..., claimed: _Optional[_Union[Claimed, _Mapping]] = ..., more: _Optional[_Iterable[_Union[EventMessage, _Mapping]]] = ...) -> None: ...
