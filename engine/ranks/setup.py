"""The setup of a rank before it loads, its report afterwards, and the pools, as JSON (processes/rank_payloads.py)."""

from dataclasses import dataclass

from wire.kv_layout import KvTensor, Rank


@dataclass(frozen=True, slots=True)
class RankSetup:
    """One rank of a tensor-parallel instance.

    `dtype` is resolved: float32, bfloat16 or float16. `cores` are those of its device (empty: all). `step_s` bounds the
    wait for the other ranks within a step. `is_native`: use native kernels, which rank 0 found to be available.
    `device` is a kind: the rank opens the first device of it that is visible to its process, where `visible` is the
    value of the kind's variable (None: unchanged). `gpu_memory_utilization` is the share of the device's memory that
    the engine may take; `has_budget`: the size of the pools was configured, else memory is reserved for the
    `largest_step`: its prompt tokens, in sequences of at most `max_model_len`, and its sequences. Decode steps of up to
    `max_graph_rows` sequences are replayed from graphs, where all ranks can.
    """

    path: str
    dtype: str
    number: int
    of: int
    block_size: int
    attention_backend: str
    quantization: str | None
    cores: tuple[int, ...]
    num_threads: int
    step_s: float
    is_native: bool = True
    log_level: str = "INFO"
    log_format: str = "text"
    device: str = "cpu"
    visible: str | None = None
    gpu_memory_utilization: float = 0.9
    has_budget: bool = False
    max_model_len: int = 0
    largest_step: tuple[int, int] | None = None
    max_graph_rows: int = 0

    @property
    def rank(self) -> Rank:
        """The rank's number and the number of ranks."""
        return Rank(self.number, self.of)


@dataclass(frozen=True, slots=True)
class RankLoaded:
    """A rank's report of its load: the KV tensors that its layers make, and the cost of loading.

    `is_native`: native kernels run its layers. `shares_memory`: it can sum in shared memory. `pool_bytes` are available
    for its pool on its `device`, described in one line; both are unset where rank 0 makes all pools. `kept` counts the
    layers that stay quantised, with the reasons for the others. The rank can replay steps of up to `graph_rows`
    sequences from graphs.
    """

    tensors: tuple[KvTensor, ...]
    is_native: bool
    shares_memory: bool
    weight_bytes: int
    bytes_read: int
    seconds: float
    pool_bytes: int = 0
    device: str = ""
    kept: str = ""
    graph_rows: int = 0


@dataclass(frozen=True, slots=True)
class PoolSetup:
    """The pools: the whole model's KV tensors, and the blocks, besides those for padding rows of `graph_rows`."""

    tensors: tuple[KvTensor, ...]
    num_blocks: int
    graph_rows: int = 0
