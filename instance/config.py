"""Configuration of one instance process: engine flags, its ranktable entry, its cores. Frozen, built once."""

import math
from dataclasses import dataclass, field

from devices.interface import Traits
from devices.table import AUTO, find_kind, traits_of
from flags.options import QUANTIZATIONS, EngineOptions
from kvtransfer.transport_table import transports_of
from ranktable_tools.core_quota import usable_threads
from ranktable_tools.launch_plan import LaunchPlan
from security.trust import Trust
from wire.errors import ConfigError
from wire.types import Role

_REFERENCE = "reference"  # attention on every kind of device
_BOUNDS: dict[str, tuple[int, float]] = {
    "max_num_seqs": (1, math.inf),
    "prefill_chunk_size": (1, math.inf),
    "gap_limit": (0, 3600),
    "block_size": (1, math.inf),
    "max_num_batched_tokens": (1, math.inf),
    "max_model_len": (2, math.inf),
    "tensor_parallel_size": (1, math.inf),
    "rank_timeout": (1, 3600),
    "kv_cache_memory": (1, math.inf),
    "swap_bytes": (0, math.inf),
    "image_cache_bytes": (0, math.inf),
    "image_timeout": (1, 3600),
    "kv_links": (1, 64),
    "http_port": (1, 65535),
}


@dataclass(frozen=True, slots=True)
class InstanceConfig:
    """One instance.

    `server_ip` and `device_ids` are its table entry; `table_port`, the port in that entry, distinguishes two clusters
    on one host. `cores` are the CPU cores it runs on (empty: all), `quota_share` is its share of this host's CPU quota.
    `ticket_lease_s` bounds how long a reservation is kept. `trust` lists the accepted peers: by default, without a
    table, loopback alone. `plan` is what the tables contained at start-up; later changes of the global table are
    followed.
    """

    options: EngineOptions
    role: Role
    server_ip: str = "127.0.0.1"
    device_ids: tuple[str, ...] = ("0",)
    table_digest: str = ""
    table_port: int | None = None
    cores: tuple[int, ...] = ()
    quota_share: float = 1.0
    ticket_lease_s: float = 10.0
    drain_s: float = 10.0
    trust: Trust = field(default_factory=Trust)
    plan: LaunchPlan | None = None

    def __post_init__(self) -> None:
        """Validate what can be checked without loading anything."""
        if not self.options.model and self.options.engine != "fake":
            raise ConfigError(
                "--model is missing: pass the folder of a model (`pdserve model path` prints the default)"
            )
        check_options(self.options)

    @property
    def num_ranks(self) -> int:
        """Ranks of the instance: --tensor-parallel-size, else one per device."""
        return self.options.tensor_parallel_size or len(self.device_ids)

    @property
    def num_threads(self) -> int:
        """Compute threads: one per core, limited by the CPU quota of the container, if any."""
        return usable_threads(self.cores, share=self.quota_share)

    def max_num_batched_tokens(self, max_model_len: int) -> int:
        """Return the limit on a whole step's tokens: the flag, raised to the model's maximum length."""
        return max(self.options.max_num_batched_tokens or 2048, max_model_len)

    def prefill_chunk_size(self, device: str) -> int:
        """Return the limit on a step's prompt tokens for `device` ("npu:0"): the flag, else the device's default."""
        return self.options.prefill_chunk_size or traits_of(device).prefill_chunk_size

    def block_size(self, device: str) -> int:
        """Return the tokens of a KV block on `device`: the flag, else the device's default."""
        return self.options.block_size or traits_of(device).block_size

    def port_range(self) -> tuple[int, int] | None:
        """Return the bounds of --kv-port-range. Raises ConfigError."""
        return parse_port_range(self.options.kv_port_range)


def check_options(options: EngineOptions) -> None:
    """Raise ConfigError, with the value and what is allowed, for flags with which no instance can start."""
    if options.device != AUTO:
        _check_attention(options, find_kind(options.device).traits)
    if options.quantization not in (None, *QUANTIZATIONS):
        raise ConfigError(f"--quantization {options.quantization!r} is not one of {', '.join(QUANTIZATIONS)}")
    for name, (minimum, maximum) in _BOUNDS.items():
        value = getattr(options, name)
        if value is not None and not minimum <= value <= maximum:
            allowed = f"at least {minimum}" if maximum == math.inf else f"{minimum} to {maximum}"
            raise ConfigError(f"--{name.replace('_', '-')} is {value}, but must be {allowed}")
    if not 0 < options.gpu_memory_utilization <= 1:
        raise ConfigError(f"--gpu-memory-utilization is {options.gpu_memory_utilization:g}, but must be in (0, 1]")
    transports_of(options.kv_transport, None if options.device == AUTO else options.device)
    parse_port_range(options.kv_port_range)


def _check_attention(options: EngineOptions, traits: Traits) -> None:
    """Raise ConfigError for an attention backend that this kind of device does not have."""
    backend, known = options.attention_backend, (AUTO, traits.attention, _REFERENCE)
    if backend not in known and options.engine != "fake":
        raise ConfigError(
            f"--attention-backend {backend!r} is not one of {', '.join(known)}, the backends of --device {traits.kind}"
        )


def parse_port_range(text: str | None) -> tuple[int, int] | None:
    """Return the bounds in --kv-port-range, None if it is not set. Raises ConfigError."""
    if text is None:
        return None
    first, _, last = text.partition("-")
    if not (_is_port(first) and _is_port(last) and int(first) <= int(last)):
        raise ConfigError(
            f"--kv-port-range {text!r} must be FIRST-LAST with 1 <= FIRST <= LAST <= 65535, such as 20000-20100"
        )
    return int(first), int(last)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 65536
