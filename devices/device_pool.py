"""A KV pool in a device's memory: one contiguous allocation, and the event after which its KV is complete."""

import threading
from typing import TYPE_CHECKING, Protocol

import torch

from wire.kv_layout import PoolLayout

if TYPE_CHECKING:
    from devices.interface import Event, Traits


class PoolDevice(Protocol):
    """What a pool needs from its device."""

    traits: "Traits"

    @property
    def name(self) -> str: ...

    @property
    def torch_device(self) -> torch.device: ...

    def event(self) -> "Event": ...


class DevicePool:
    """Owns the memory. Implements kvtransfer's DeviceMemory."""

    def __init__(self, layout: PoolLayout, device: PoolDevice) -> None:
        """Allocate the pool. Raises torch's RuntimeError if there is not enough memory."""
        self.layout, self._device = layout, device
        align = device.traits.pool_alignment
        self._allocation = torch.empty(layout.total_bytes + align, dtype=torch.uint8, device=device.torch_device)
        start = -self._allocation.data_ptr() % align
        self._tensor: torch.Tensor | None = self._allocation[start : start + layout.total_bytes]
        self._written: Event | None = None
        self._num_marks, self._marking = 0, threading.Condition()

    @property
    def device(self) -> str:
        """The name of its device, such as "npu:0"."""
        return self._device.name

    @property
    def fd(self) -> int | None:
        """None: the pool is not in host memory."""
        return None

    @property
    def buffer(self) -> memoryview:
        """Raises TypeError: host code cannot access device memory."""
        raise TypeError(f"a KV pool on {self.device} has no host buffer: use its tensor")

    @property
    def tensor(self) -> torch.Tensor:
        """The whole pool: uint8, [layout.total_bytes]."""
        if self._tensor is None:
            raise ValueError(f"the KV pool on {self.device} is closed")
        return self._tensor

    def written(self) -> None:
        """Record an event on the engine's stream: `ready` then waits for all KV launched so far."""
        event = self._device.event()
        event.record()
        with self._marking:
            self._written = event
            self._num_marks += 1
            self._marking.notify_all()

    @property
    def num_marks(self) -> int:
        """The number of events recorded so far."""
        return self._num_marks

    def await_marks(self, count: int, timeout_s: float) -> bool:
        """Wait, on a thread other than the engine's, until `count` events are recorded; return whether they are."""
        with self._marking:
            return self._marking.wait_for(lambda: self._num_marks >= count, timeout_s)

    def mark(self) -> "Event | None":
        """Return the latest event, after which all KV reported so far is complete. None before the first."""
        return self._written

    def ready(self) -> None:
        """Make torch's current stream wait for the latest event; does not block."""
        written = self._written
        if written is not None:
            written.wait()

    def close(self) -> None:
        """Release the memory, which is freed with the last tensor that refers to it. Idempotent."""
        self._tensor = None
        self._allocation = torch.empty(0, dtype=torch.uint8)
