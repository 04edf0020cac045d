"""The handles that cuda_ipc sends in a SETUP message and opens, and the driver calls this needs."""

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvtransfer.link_codec import WireError, pack
from kvtransfer.link_messages import MessageType

if TYPE_CHECKING:
    import torch

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE, of memory and of events
UUID_BYTES = 16
_SETUP = struct.Struct(f"!{UUID_BYTES}sQQ{HANDLE_BYTES}s{HANDLE_BYTES}s")


class PoolHandles(NamedTuple):
    """Handles to open a sender's pool in another process of the host, `offset` bytes into its allocation `memory`."""

    device_uuid: bytes
    num_bytes: int
    offset: int
    memory: bytes
    event: bytes


class SharedEvent(Protocol):
    """An event of this process that other processes can wait for."""

    @property
    def handle(self) -> bytes:
        """Its IPC handle of 64 bytes."""
        ...

    def record(self, ready: Callable[[], None], timeout_s: float) -> None:
        """Record it on its own stream, after the work that `ready` makes the stream wait for; wait until it is reached.

        Raises OSError, also after `timeout_s`.
        """
        ...


class MappedPool(Protocol):
    """A peer's pool mapped into this process."""

    @property
    def tensor(self) -> "torch.Tensor":
        """The pool: uint8, [num_bytes]. Must not be used after `close`."""
        ...

    def wait_event(self) -> None:
        """Make torch's current stream wait for the sender's event as last recorded."""
        ...

    def close(self) -> None:
        """Unmap it; idempotent."""
        ...


class IpcDriver(Protocol):
    """The driver calls that cuda_ipc needs. Thread-safe."""

    def lacking(self, pool: "torch.Tensor") -> str | None:
        """Return why this pool cannot be shared with other processes, or None."""
        ...

    def make_event(self, device: str) -> SharedEvent:
        """Make an event. Raises OSError."""
        ...

    def export(self, pool: "torch.Tensor", event: SharedEvent) -> PoolHandles:
        """Return the handles of a pool. Raises OSError."""
        ...

    def knows(self, device_uuid: bytes) -> bool:
        """Return whether the device is visible to this process."""
        ...

    def open(self, handles: PoolHandles) -> MappedPool:
        """Map a peer's pool. Raises OSError, also if the pool exceeds its allocation."""
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
