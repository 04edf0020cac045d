"""The handles that cuda_ipc sends in a SETUP message and opens, and the driver calls that it needs."""

import struct
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvtransfer.link_codec import WireError, pack
from kvtransfer.link_messages import MessageType

if TYPE_CHECKING:
    import torch

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_SETUP = struct.Struct(f"!QQ{HANDLE_BYTES}s")


class PoolHandles(NamedTuple):
    """What another process of the host needs to open a pool, which starts at `offset` of the allocation `memory`."""

    num_bytes: int
    offset: int
    memory: bytes


class MappedPool(Protocol):
    """A peer's pool mapped into this process."""

    @property
    def tensor(self) -> "torch.Tensor":
        """The pool: uint8, [num_bytes]. Must not be used after `close`."""
        ...

    def close(self) -> None:
        """Unmap it; idempotent."""
        ...


class IpcDriver(Protocol):
    """The driver calls that cuda_ipc needs. Thread-safe."""

    def lacking(self, pool: "torch.Tensor") -> str | None:
        """Return why this pool cannot be shared with other processes, or None."""
        ...

    def export(self, pool: "torch.Tensor") -> PoolHandles:
        """Return the handles of a pool. Raises OSError."""
        ...

    def open(self, handles: PoolHandles, device: str) -> MappedPool:
        """Map a peer's pool for reads by `device`, which may differ from the pool's device.

        Raises OSError, also if the pool exceeds its allocation.
        """
        ...


def encode_handles(handles: PoolHandles) -> bytes:
    """Return prefix and body of SETUP."""
    return pack(MessageType.SETUP, _SETUP.pack(*handles))


def decode_handles(body: bytes | bytearray) -> PoolHandles:
    """Decode SETUP. Raises WireError."""
    try:
        return PoolHandles(*_SETUP.unpack(body))
    except struct.error as error:
        raise WireError(f"malformed SETUP of {len(body)} bytes, expected {_SETUP.size}: {error}") from error
