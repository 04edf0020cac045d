"""The description of an instance, which it returns before a session is opened."""

from dataclasses import dataclass

from wire.kv_layout import KvTensor
from wire.types import KvEndpoint, Role


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What two processes compare before they connect. Digests are the first 16 hex digits of a sha256."""

    name: str
    weights_digest: str
    tokenizer_digest: str


@dataclass(frozen=True, slots=True)
class ForeignWorker:
    """Facts about a worker of another engine: `engine`, such as `vLLM 0.32.0`, and its path (scheduler/paths)."""

    engine: str
    path: str
    num_ranks: int = 1


@dataclass(frozen=True, slots=True)
class InstanceDescription:
    """The properties of an instance, fixed for the life of its process (`epoch` is random per process).

    `kv_digests`: whether it requires a digest of every KV frame; a link omits them only if neither end requires them.
    `kv_transports` lists the default or configured transports, best first: `shm` if offered, else `shm: reason`.
    `reuse_decoded`: whether a later prompt finds the KV of outputs that the instance generated.
    `worker` is set for workers of other engines, whose other properties are mostly unknown; no instance sends it.
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
    reuse_decoded: bool = True
    worker: ForeignWorker | None = None

    @property
    def path(self) -> str:
        """How its prompts get from prefill to decode."""
        return "handoff" if self.worker is None else self.worker.path

    @property
    def engine(self) -> str:
        """The engine's name and version, such as `vLLM 0.32.0`."""
        return "pdserve" if self.worker is None else self.worker.engine
