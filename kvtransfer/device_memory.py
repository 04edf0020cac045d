"""KV pools in device memory: their interface, how a Place refers to them, and which mover copies their bytes.

    PoolMemory.tensor  --region_of-->  DeviceRegion  in a Place  --process_mover()-->  TorchMover (mover.py)
    PoolMemory.buffer  --region_of-->  Region                                          the native functions

Nothing here imports torch: a process whose pools are in host memory does not need it.
"""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, Protocol

from kvtransfer.digest import Region
from kvtransfer.interface import PoolMemory
from wire.kv_layout import PoolLayout

if TYPE_CHECKING:
    import torch

    from devices.interface import Event


class DeviceMemory(Protocol):
    """A pool in device memory. It is a PoolMemory too: its `fd` is None, and its `buffer` raises TypeError."""

    layout: PoolLayout

    @property
    def device(self) -> str:
        """The device that holds it, such as "cuda:0" or "npu:0"."""
        ...

    @property
    def tensor(self) -> "torch.Tensor":
        """The whole pool as bytes: uint8, [layout.total_bytes], one piece of memory until the pool is closed."""
        ...

    def mark(self) -> "Event | None":
        """Return the newest mark, None before the first; `Sender.put` records it with the put.

        The engine records an event after the layer's kernels and before the put, so all KV of the put precedes it.
        """
        ...

    def await_marks(self, count: int, timeout_s: float) -> bool:
        """Wait until `count` marks have been recorded since the pool was created; return False on a timeout."""
        ...

    def ready(self) -> None:
        """Make torch's current stream wait for the newest mark; must not block."""
        ...


class DeviceRegion(Region):
    """A range of device memory used as a Region. It has no `view` or `address`: host code cannot access it."""

    __slots__ = ("ready", "tensor")

    def __init__(
        self, tensor: "torch.Tensor", *, readonly: bool = False, ready: Callable[[], None] | None = None
    ) -> None:
        """`tensor` is uint8, [num_bytes]; `ready` is called, on the reading stream, before bytes are read.

        Raises ValueError for any other tensor.
        """
        if tensor.dim() != 1 or tensor.element_size() != 1 or not tensor.is_contiguous():
            raise ValueError(f"a region is contiguous bytes, not {tensor.dtype} of {tuple(tensor.shape)}")
        self.tensor, self.ready = tensor, ready
        self.num_bytes, self.readonly = tensor.numel(), readonly

    def after(self, mark: "Event") -> "DeviceRegion":
        """Return the same memory for reads that wait for `mark`, regardless of later marks."""
        return DeviceRegion(self.tensor, readonly=self.readonly, ready=mark.wait)

    def complete(self) -> "DeviceRegion":
        """Return the same memory for reads of KV that is already complete: they wait for nothing."""
        return DeviceRegion(self.tensor, readonly=self.readonly, ready=_do_nothing)

    def __getattr__(self, name: str) -> NoReturn:
        """Reject attributes that only a host Region has. Raises TypeError."""
        raise TypeError(f"memory on {self.tensor.device} has no {name}: only a TorchMover moves it")


def _do_nothing() -> None:
    pass


def device_memory(memory: PoolMemory) -> DeviceMemory | None:
    """Return the pool as a DeviceMemory, or None if it is in host memory."""
    return None if getattr(memory, "tensor", None) is None else memory  # type: ignore[return-value]


def region_of(memory: PoolMemory) -> Region:
    """Return the whole pool as a region, for Places of either kind of memory; reads wait for the newest mark."""
    device = device_memory(memory)
    if device is None:
        return Region(memory.buffer)
    return DeviceRegion(device.tensor, ready=device.ready)


def scratch_of(memory: PoolMemory, num_bytes: int) -> Region:
    """Return memory of the pool's kind for bytes that nobody reads; host memory if the device is full."""
    device = device_memory(memory)
    if device is not None:
        with contextlib.suppress(RuntimeError):  # torch's OutOfMemoryError is one
            return DeviceRegion(device.tensor.new_empty(num_bytes))
    return Region(bytearray(num_bytes))
