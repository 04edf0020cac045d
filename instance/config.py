"""What one instance process is told: engine flags, its place in the table, its cores. Frozen, built once."""

from dataclasses import dataclass, field

from kvtransfer.transports import NAMES
from wire.errors import ConfigError
from wire.options import EngineOptions
from wire.trust import Trust
from wire.types import Role


@dataclass(frozen=True, slots=True)
class InstanceConfig:
    """One instance.

    `server_ip` and `device_ids` are its table entry, `table_port` the port that stands there, which tells two clusters
    of one host apart; `cores` are the CPU cores it runs on (empty: all).
    `session_lease_s` bounds how long a silent scheduler's work is kept, `ticket_lease_s` how long a reservation is.
    `trust` says who its peers are: by default, without a table, loopback alone.
    """

    options: EngineOptions
    role: Role
    server_ip: str = "127.0.0.1"
    device_ids: tuple[str, ...] = ("0",)
    table_digest: str = ""
    table_port: int | None = None
    cores: tuple[int, ...] = ()
    session_lease_s: float = 10.0
    ticket_lease_s: float = 10.0
    drain_s: float = 10.0
    trust: Trust = field(default_factory=Trust)

    def __post_init__(self) -> None:
        """Validate what can be seen without loading anything."""
        options = self.options
        if not options.model and options.engine != "fake":
            raise ConfigError(
                "--model is missing: give the folder of a model (`pdserve model path` prints the default)"
            )
        if options.device not in ("auto", "cpu"):
            raise ConfigError(f"--device {options.device}: only the CPU backend exists so far; use --device cpu")
        if options.quantization is not None:
            raise ConfigError(f"--quantization {options.quantization}: quantised checkpoints are not supported yet")
        for name in ("max_num_seqs", "prefill_chunk_size", "block_size", "kv_links"):
            if getattr(options, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(options, name)}, must be at least 1")
        for transport in options.kv_transport:
            if transport not in NAMES:
                raise ConfigError(f"--kv-transport {transport!r} is not one of {', '.join(NAMES)}")
        self.port_range()

    def max_num_batched_tokens(self, max_model_len: int) -> int:
        """Return the bound of a whole step: the flag, raised to the model's length."""
        return max(self.options.max_num_batched_tokens or 2048, max_model_len)

    def port_range(self) -> tuple[int, int] | None:
        """Return the bounds of --kv-port-range. Raises ConfigError."""
        text = self.options.kv_port_range
        if text is None:
            return None
        first, _, last = text.partition("-")
        if not (first.isdigit() and last.isdigit() and 0 < int(first) <= int(last) < 65536):
            raise ConfigError(f"--kv-port-range {text!r} must be FIRST-LAST with ports in 1..65535, as 20000-20100")
        return int(first), int(last)
