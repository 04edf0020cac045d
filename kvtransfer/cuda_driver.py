"""The CUDA driver's calls for cuda_ipc, by ctypes. Needs torch with CUDA. Never run by us: docs/devices.md.

libcuda.so.1 is installed with every driver, and its IPC calls have not changed since CUDA 4.1. torch's own sharing is
not used: its counters are in /dev/shm and written by the receiver, its handles change with torch's version, and its
tensors depend on a process-wide cache. torch provides the contexts, the events, and the view of the mapping.

Memory of `expandable_segments:True` and of cudaMallocAsync has no IPC handle: `lacking` tries to get one.
"""

import ctypes
import functools
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from devices.polling import wait_until
from kvtransfer.cuda_handles import HANDLE_BYTES, PoolHandles, SharedEvent

_cuda: Any = torch.cuda  # the parts of it without types
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: the only flag


class _Handle(ctypes.Structure):
    """CUipcMemHandle; passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaDriver:
    """Implements cuda_handles.IpcDriver."""

    def lacking(self, pool: torch.Tensor) -> str | None:
        """Try to export the pool, and return why that fails, or None."""
        if pool.device.type != "cuda":
            return f"the KV pool is on {pool.device}, cuda_ipc supports cuda only"
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
        try:
            with _context(pool.device):
                _handle_of(pool)
        except OSError as error:
            return (
                f"the pool's allocation cannot be exported: {error} (torch's allocator needs expandable_segments off)"
            )
        return None

    def make_event(self, device: str) -> "CudaEvent":
        """Make an interprocess event on `device`."""
        return CudaEvent(torch.device(device))

    def export(self, pool: torch.Tensor, event: SharedEvent) -> PoolHandles:
        """Return the handles; `offset` is the pool's position in its allocation."""
        with _context(pool.device) as number:
            handle, offset = _handle_of(pool)
            return PoolHandles(_uuid_of(number), pool.numel(), offset, handle, event.handle)

    def knows(self, device_uuid: bytes) -> bool:
        """Return whether the device is visible: CUDA_VISIBLE_DEVICES may hide it."""
        return device_uuid in _devices()

    def open(self, handles: PoolHandles) -> "CudaPool":
        """Map the pool in the context of the device that holds it."""
        return CudaPool(handles, torch.device("cuda", _devices().index(handles.device_uuid)))


class CudaEvent:
    """An event that other processes can wait for, and the stream it is recorded on."""

    def __init__(self, device: torch.device) -> None:
        """Raises OSError."""
        self._device = device
        with _context(device):
            self._stream = _cuda.Stream(device=device)
            self._event = _cuda.Event(interprocess=True)
            self._event.record(self._stream)
            self.handle = bytes(self._event.ipc_handle())

    def record(self, ready: Callable[[], None], timeout_s: float) -> None:
        """See SharedEvent. Raises OSError."""
        with _context(self._device), torch.cuda.stream(self._stream):
            ready()
            self._event.record(self._stream)
            if not wait_until(self._event.query, timeout_s):
                raise TimeoutError(f"{self._device} did not reach the event within {timeout_s:g} s")


class CudaPool:
    """Owner of one mapping of a peer's pool."""

    def __init__(self, handles: PoolHandles, device: torch.device) -> None:
        """Raises OSError."""
        self._device, self._base, self._lock = device, 0, threading.Lock()
        self.tensor = torch.empty(0, dtype=torch.uint8)
        base = ctypes.c_uint64()
        with _context(device):
            _call(
                "cuIpcOpenMemHandle_v2", ctypes.byref(base), _Handle.from_buffer_copy(handles.memory), _LAZY_PEER_ACCESS
            )
            self._base = base.value
            try:
                start, size = _allocation_of(self._base)
                if self._base + handles.offset + handles.num_bytes > start + size:
                    raise OSError(f"{handles.num_bytes} bytes at {handles.offset} are not in an allocation of {size}")
                self.tensor = _bytes_at(self._base + handles.offset, handles.num_bytes, device)
                self._event = _cuda.Event.from_ipc_handle(device, handles.event)
            except BaseException:
                self.close()
                raise

    def wait_event(self) -> None:
        """See MappedPool."""
        self._event.wait()

    def close(self) -> None:
        """Unmap. Raises OSError."""
        with self._lock:
            base, self._base = self._base, 0
        if base:
            self.tensor = torch.empty(0, dtype=torch.uint8)
            with _context(self._device):
                _call("cuIpcCloseMemHandle", ctypes.c_uint64(base))


class _Mapped:
    """Foreign device memory in the form that torch wraps without a copy; the tensor keeps this object alive."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 2,
        }  # fmt: skip


def _bytes_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    tensor = torch.as_tensor(_Mapped(address, num_bytes), device=device)  # [num_bytes]
    if tensor.data_ptr() != address:
        raise OSError(f"torch copied the mapping at {address:#x}: it takes it to be on a device other than {device}")
    return tensor


def _handle_of(pool: torch.Tensor) -> tuple[bytes, int]:
    """Return the handle of the allocation that contains the pool, and the pool's offset in it."""
    base, handle = _allocation_of(pool.data_ptr())[0], _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
    return bytes(handle), pool.data_ptr() - base


def _allocation_of(address: int) -> tuple[int, int]:
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    return base.value, size.value


def _devices() -> list[bytes]:
    return [_uuid_of(number) for number in range(torch.cuda.device_count())]


def _uuid_of(number: int) -> bytes:
    return uuid.UUID(str(torch.cuda.get_device_properties(number).uuid)).bytes


@contextmanager
def _context(device: torch.device) -> Iterator[int]:
    """Make the device's primary context, which torch uses, current in this thread; yield the device's number.

    Translates torch's exceptions in the block to OSError.
    """
    try:
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # a runtime call creates the context if there is none
            yield torch.cuda.current_device()
    except RuntimeError as error:
        raise OSError(f"{device}: {error}") from error


def _call(name: str, *arguments: Any) -> None:
    driver = _library()
    status = getattr(driver, name)(*arguments)
    if status != 0:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(text))
        raise OSError(f"{name}: {(text.value or b'unknown error').decode()} ({status})")


@functools.cache
def _library() -> ctypes.CDLL:
    """Load the driver. Raises OSError if it is not installed."""
    return ctypes.CDLL("libcuda.so.1")
