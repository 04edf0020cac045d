"""Check the flags of instances before one is started: a mistake is told where it was typed, not in a child's log."""

from wire.errors import ConfigError
from wire.kv_transports import ONE_HOST
from wire.options import EngineOptions


def check_engine_flags(options: EngineOptions, instances: int = 1) -> None:
    """Raise ConfigError, with the value and what is allowed, for flags that `instances` on one host cannot take."""
    try:
        from instance.config import check_options, parse_port_range
        from kvtransfer.transports import DEFAULT_NAMES
    except ModuleNotFoundError:
        return  # the engine is not installed, and who needs it says so
    check_options(options)
    ports = parse_port_range(options.kv_port_range)
    if ports is None or set(options.kv_transport or DEFAULT_NAMES) <= set(ONE_HOST):
        return
    ranks = options.tensor_parallel_size or 1
    num_ports = ports[1] - ports[0] + 1
    if num_ports < instances * ranks:
        raise ConfigError(
            f"--kv-port-range {options.kv_port_range!r} has {num_ports} ports: {instances * ranks} ranks "
            f"({instances} instances x {ranks}) take one each"
        )
