"""What one rank is told before it loads, and what it says once it has: frozen, as JSON on the wire."""

import dataclasses
import json
from dataclasses import dataclass

from wire.kv_layout import KvTensor, Rank
from wire.rank_payloads import read_object


@dataclass(frozen=True, slots=True)
class RankSetup:
    """One rank of a tensor-parallel instance.

    `dtype` is settled: float32, bfloat16 or float16. `cores` are its own device's (empty: all). `step_s` bounds how
    long it waits for the others within a step. `is_native`: it uses native kernels, as rank 0 found them there.
    `device` is the kind of device that it opens the first of, of those shown to its process: `visible` is the value of
    the kind's variable there (None: as it is). `gpu_memory_utilization` is the share of it that the engine may take;
    `has_budget`: it was said how large the pools are, else memory is left for the `largest_step`: prompt tokens of
    sequences of `max_model_len` at most, and sequences.
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

    @property
    def rank(self) -> Rank:
        """Which rank of how many."""
        return Rank(self.number, self.of)

    def to_json(self) -> bytes:
        """Return what `from_json` reads."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_json(cls, payload: bytes) -> "RankSetup":
        """Raises ValueError for what `to_json` did not make."""
        values = read_object(payload, cls)
        largest = values["largest_step"]
        step = None if largest is None else (int(largest[0]), int(largest[1]))
        return cls(**{**values, "cores": tuple(values["cores"]), "largest_step": step})


@dataclass(frozen=True, slots=True)
class RankLoaded:
    """What a rank has loaded: the KV tensors its layers make, and what that took.

    `is_native`: native kernels run its layers. `shares_memory`: it can sum in memory that ranks share. `pool_bytes` are
    there for its pool on its `device`, which is described in a line; both say nothing where rank 0 makes all pools.
    """

    tensors: tuple[KvTensor, ...]
    is_native: bool
    shares_memory: bool
    weight_bytes: int
    bytes_read: int
    seconds: float
    pool_bytes: int = 0
    device: str = ""

    def to_json(self) -> bytes:
        """Return what `from_json` reads."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_json(cls, payload: bytes) -> "RankLoaded":
        """Raises ValueError for what `to_json` did not make."""
        values = read_object(payload, cls)
        return cls(**{**values, "tensors": tuple(KvTensor(**tensor) for tensor in values["tensors"])})
