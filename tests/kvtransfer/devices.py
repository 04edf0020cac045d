"""Pools of device memory for tests, CPU tensors where there is no device; a driver for cuda_ipc within one process."""

import secrets
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvtransfer import transport_table
from kvtransfer.cuda_handles import IpcDriver, PoolHandles
from kvtransfer.cuda_ipc import CudaIpcTransport
from kvtransfer.interface import PoolMemory
from kvtransfer.transport_interface import Transport
from wire.kv_layout import PoolLayout

_BEFORE, _BEHIND = 4096, 512  # of other memory in the pool's allocation


class DevicePool:
    """A pool on `device`, in the middle of an allocation. `buffer` is for tests only, and only on the CPU."""

    def __init__(self, layout: PoolLayout, seals: int = 0, device: str = "cpu") -> None:
        self.layout, self.device, self.waits = layout, device, 0
        allocation = torch.zeros(_BEFORE + layout.total_bytes + _BEHIND, dtype=torch.uint8, device=device)
        self.tensor = allocation[_BEFORE : _BEFORE + layout.total_bytes]  # [total_bytes]

    @property
    def fd(self) -> int | None:
        return None

    @property
    def buffer(self) -> memoryview:
        if sys._getframe(1).f_globals["__name__"].startswith("kvtransfer"):
            raise TypeError(f"a pool on {self.device} has no buffer")
        return memoryview(self.tensor.numpy())  # type: ignore[arg-type]

    def mark(self) -> None:
        """No KV of this pool is ever in progress."""

    def await_marks(self, count: int, timeout_s: float) -> bool:
        return True

    def ready(self) -> None:
        self.waits += 1

    def close(self) -> None:
        """The tensor is freed with its last user."""


@dataclass
class FakeHost:
    """What the processes of one host share: exported allocations by handle. Owner of the count of open mappings."""

    allocations: dict[bytes, torch.Tensor] = field(default_factory=dict)
    opened: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, change: int) -> None:
        with self.lock:
            self.opened += change


class FakeOpened:
    """A mapping: the exporter's own memory."""

    def __init__(self, host: FakeHost, tensor: torch.Tensor) -> None:
        self._host, self.tensor, self._open = host, tensor, True
        host.count(1)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._host.count(-1)


class FakeDriver:
    """Implements cuda_handles.IpcDriver for CPU tensors within one process."""

    def __init__(self, host: FakeHost) -> None:
        self._host = host

    def lacking(self, pool: torch.Tensor) -> str | None:
        return None

    def export(self, pool: torch.Tensor) -> PoolHandles:
        handle, storage = secrets.token_bytes(64), pool.untyped_storage()
        self._host.allocations[handle] = torch.empty(0, dtype=torch.uint8).set_(storage)
        return PoolHandles(pool.numel(), int(pool.storage_offset()), handle)

    def open(self, handles: PoolHandles, device: str) -> FakeOpened:
        allocation = self._host.allocations.get(handles.memory)
        if allocation is None:
            raise OSError("invalid resource handle")
        if handles.offset + handles.num_bytes > allocation.numel():
            raise OSError(
                f"{handles.num_bytes} bytes at {handles.offset} are not in an allocation of {allocation.numel()} bytes"
            )
        return FakeOpened(self._host, allocation[handles.offset : handles.offset + handles.num_bytes])


def offer_cuda_ipc(driver: IpcDriver | None) -> tuple[dict[str, Callable[[PoolMemory], Transport]], tuple[str, ...]]:
    """Return the table of transports and its names with cuda_ipc first, over this driver."""

    def make(memory: PoolMemory) -> CudaIpcTransport:
        return CudaIpcTransport(memory, driver)

    makers = {"cuda_ipc": make, **{name: made for name, made in transport_table._MAKERS.items() if name != "cuda_ipc"}}
    return makers, tuple(makers)
