"""Which transports of the KV hop this machine can run, and why it cannot run the others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from devices.host_pool import HostPool
from kvtransfer.transports import NAMES, make_transports
from wire.errors import ConfigError
from wire.kv_layout import KvTensor, PoolLayout

EACH = "each"
_TENSORS = (KvTensor(0, "k", 1, 16, "float32"),)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The transports to verify, best first, and in words why the others of those asked for are not among them."""

    names: tuple[str, ...]
    lacking: Mapping[str, str]


def choose(asked: str, names: Sequence[str] = NAMES) -> Chosen:
    """Return the one asked for, or all that run over a pool in host memory, which is what the instances have.

    Raises ConfigError for one asked for by name that this machine lacks, and when there is none at all.
    """
    lacking = {name: why for name in names if asked in (EACH, name) and (why := _lacking(name)) is not None}
    if asked in lacking:
        raise ConfigError(f"--transport {asked} cannot run here: {lacking[asked]}")
    usable = tuple(name for name in names if asked in (EACH, name) and name not in lacking)
    if not usable:
        raise ConfigError(f"no transport can run here: {'; '.join(f'{name}: {why}' for name, why in lacking.items())}")
    return Chosen(usable, lacking)


def _lacking(name: str) -> str | None:
    """Say what `name` lacks here, as an instance that is told to use it would."""
    with HostPool(PoolLayout(_TENSORS, num_blocks=1, block_size=16)) as pool:
        try:
            make_transports((name,), pool)
        except ConfigError as error:
            return str(error).removeprefix(f"--kv-transport {name}: ")
    return None
