"""What cuda_ipc lends and opens, as handles in a SETUP message, and the driver's calls it needs for that."""

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvtransfer.frame import MessageType, WireError, pack

if TYPE_CHECKING:
    import torch

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE, of memory and of events
UUID_BYTES = 16
_SETUP = struct.Struct(f"!{UUID_BYTES}sQQ{HANDLE_BYTES}s{HANDLE_BYTES}s")


class Lent(NamedTuple):
    """A sender's pool as another process of the host can open it: `offset` bytes into the allocation of `memory`."""

    device_uuid: bytes
    num_bytes: int
    offset: int
    memory: bytes
    event: bytes


class LentEvent(Protocol):
    """An event of this process that others may wait for."""

    @property
    def handle(self) -> bytes:
        """Its 64 bytes."""
        ...

    def record(self, ready: Callable[[], None], timeout_s: float) -> None:
        """Record it on a stream of its own, behind what `ready` makes that stream wait for; wait until it is reached.

        Raises OSError, also where that takes more than `timeout_s`.
        """
        ...


class MappedPool(Protocol):
    """A peer's pool mapped into this process."""

    @property
    def tensor(self) -> "torch.Tensor":
        """The pool: uint8, [num_bytes]. Must not be used after `close`."""
        ...

    def wait_event(self) -> None:
        """Make torch's current stream wait for the sender's event as it was recorded last."""
        ...

    def close(self) -> None:
        """Unmap it; idempotent."""
        ...


class IpcDriver(Protocol):
    """What cuda_ipc needs of a driver. Thread-safe."""

    def lacking(self, pool: "torch.Tensor") -> str | None:
        """Why this pool cannot be lent to other processes, in words, or None."""
        ...

    def lend_event(self, device: str) -> LentEvent:
        """Make an event. Raises OSError."""
        ...

    def lend(self, pool: "torch.Tensor", event: LentEvent) -> Lent:
        """Return the handles of a pool. Raises OSError."""
        ...

    def knows(self, device_uuid: bytes) -> bool:
        """Whether this process sees the device."""
        ...

    def open(self, lent: Lent) -> MappedPool:
        """Map a peer's pool. Raises OSError, also where the pool does not lie within its allocation."""
        ...


def encode_lent(lent: Lent) -> bytes:
    """Return prefix and body of SETUP."""
    return pack(MessageType.SETUP, _SETUP.pack(*lent))


def decode_lent(body: bytes | bytearray) -> Lent:
    """Rebuild SETUP. Raises WireError."""
    try:
        return Lent(*_SETUP.unpack(body))
    except struct.error as error:
        raise WireError(f"malformed SETUP of {len(body)} bytes, a pool's is {_SETUP.size}: {error}") from error
