"""A KV pool in a device's memory: one piece of bytes, and the mark behind which its KV is complete."""

from typing import TYPE_CHECKING, Protocol

import torch

from wire.kv_layout import PoolLayout

if TYPE_CHECKING:
    from devices.interface import Event, Traits


class PoolDevice(Protocol):
    """What a pool needs of its device."""

    traits: "Traits"

    @property
    def name(self) -> str: ...

    @property
    def torch_device(self) -> torch.device: ...

    def event(self) -> "Event": ...


class DevicePool:
    """Owner of the memory. Implements kvtransfer's DeviceMemory."""

    def __init__(self, layout: PoolLayout, device: PoolDevice) -> None:
        """Raises RuntimeError, as torch does, where there is not enough memory."""
        self.layout, self._device = layout, device
        align = device.traits.pool_alignment
        self._allocation = torch.empty(layout.total_bytes + align, dtype=torch.uint8, device=device.torch_device)
        start = -self._allocation.data_ptr() % align
        self._tensor: torch.Tensor | None = self._allocation[start : start + layout.total_bytes]
        self._written: Event | None = None

    @property
    def device(self) -> str:
        """Where it lies, as "npu:0"."""
        return self._device.name

    @property
    def fd(self) -> int | None:
        """None: it is no host memory."""
        return None

    @property
    def buffer(self) -> memoryview:
        """Raises TypeError: host code cannot reach it."""
        raise TypeError(f"a KV pool on {self.device} has no buffer: only torch moves it")

    @property
    def tensor(self) -> torch.Tensor:
        """The whole pool: uint8, [layout.total_bytes]."""
        if self._tensor is None:
            raise ValueError(f"the KV pool on {self.device} is closed")
        return self._tensor

    def written(self) -> None:
        """Mark, on the engine's stream, that all KV launched so far is what `ready` waits for."""
        event = self._device.event()
        event.record()
        self._written = event

    def mark(self) -> "Event | None":
        """Return the newest mark: all KV that the engine reported so far lies behind it. None before the first."""
        return self._written

    def ready(self) -> None:
        """Make torch's current stream wait for the newest mark; does not block."""
        written = self._written
        if written is not None:
            written.wait()

    def close(self) -> None:
        """Give the memory back; it goes with its last tensor. Idempotent."""
        self._tensor = None
        self._allocation = torch.empty(0, dtype=torch.uint8)
