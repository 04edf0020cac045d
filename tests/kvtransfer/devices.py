"""Pools of device memory for tests, CPU tensors where there is no device; a driver for cuda_ipc within one process."""

import secrets
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvtransfer import transports
from kvtransfer.cuda_handles import IpcDriver, PoolHandles
from kvtransfer.cuda_ipc import CudaIpcTransport
from kvtransfer.interface import PoolMemory
from kvtransfer.transport import Transport
from wire.kv_layout import PoolLayout

_BEFORE, _BEHIND = 4096, 512  # of other memory in the pool's allocation
GPU_UUID = bytes(range(16))


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

    def ready(self) -> None:
        self.waits += 1

    def close(self) -> None:
        """The tensor is freed with its last user."""


@dataclass
class FakeHost:
    """What the processes of one host share: exported allocations by handle, events by handle. Owner of the counts."""

    allocations: dict[bytes, torch.Tensor] = field(default_factory=dict)
    events: dict[bytes, "FakeEvent"] = field(default_factory=dict)
    opened: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, change: int) -> None:
        with self.lock:
            self.opened += change


class FakeEvent:
    """An event that remembers how often it was recorded and waited for."""

    def __init__(self) -> None:
        self.handle, self.recorded, self.waited = secrets.token_bytes(64), 0, 0

    def record(self, ready: Callable[[], None], timeout_s: float) -> None:
        assert 0 < timeout_s < float("inf")
        ready()
        self.recorded += 1


class FakeOpened:
    """A mapping: the exporter's own memory."""

    def __init__(self, host: FakeHost, tensor: torch.Tensor, event: FakeEvent) -> None:
        self._host, self.tensor, self._event, self._open = host, tensor, event, True
        host.count(1)

    def wait_event(self) -> None:
        assert self._open, "read after close"
        assert self._event.recorded, "read before the sender's event was recorded"
        self._event.waited += 1

    def close(self) -> None:
        if self._open:
            self._open = False
            self._host.count(-1)


class FakeDriver:
    """Implements cuda_handles.IpcDriver for CPU tensors within one process; a pool lies on the device `mine`."""

    def __init__(self, host: FakeHost, mine: bytes = GPU_UUID, seen: tuple[bytes, ...] = (GPU_UUID,)) -> None:
        self._host, self._mine, self._seen = host, mine, seen

    def lacking(self, pool: torch.Tensor) -> str | None:
        return None

    def make_event(self, device: str) -> FakeEvent:
        event = FakeEvent()
        self._host.events[event.handle] = event
        return event

    def export(self, pool: torch.Tensor, event: object) -> PoolHandles:
        assert isinstance(event, FakeEvent)
        handle, storage = secrets.token_bytes(64), pool.untyped_storage()
        self._host.allocations[handle] = torch.empty(0, dtype=torch.uint8).set_(storage)
        return PoolHandles(self._mine, pool.numel(), int(pool.storage_offset()), handle, event.handle)

    def knows(self, device_uuid: bytes) -> bool:
        return device_uuid in self._seen

    def open(self, handles: PoolHandles) -> FakeOpened:
        allocation = self._host.allocations.get(handles.memory)
        if allocation is None:
            raise OSError("invalid resource handle")
        if handles.offset + handles.num_bytes > allocation.numel():
            raise OSError(
                f"{handles.num_bytes} bytes at {handles.offset} are not in an allocation of {allocation.numel()}"
            )
        tensor = allocation[handles.offset : handles.offset + handles.num_bytes]
        return FakeOpened(self._host, tensor, self._host.events[handles.event])


def offer_cuda_ipc(driver: IpcDriver | None) -> tuple[dict[str, Callable[[PoolMemory], Transport]], tuple[str, ...]]:
    """Return the table of transports and its names with cuda_ipc first, over this driver."""

    def make(memory: PoolMemory) -> CudaIpcTransport:
        return CudaIpcTransport(memory, driver)

    makers = {"cuda_ipc": make, **{name: made for name, made in transports._MAKERS.items() if name != "cuda_ipc"}}
    return makers, tuple(makers)
