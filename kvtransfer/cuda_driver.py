"""The CUDA driver's calls for cuda_ipc, by ctypes. Needs torch with CUDA. We have never run it: docs/devices.md.

libcuda.so.1 is installed with every driver, and its IPC calls have not changed since CUDA 4.1. torch's own sharing is
not used: its counters are in /dev/shm and written by the receiver, its handles change with torch's version, and its
tensors depend on a process-wide cache. torch provides the contexts and the tensor over the mapping.

A pool is mapped in the context of the reader's own device, with peer access to the pool's device. From CUDA 10.1 on,
that device may be invisible to the process (NCCL's transport/p2p.cc: p2pCanConnect, ncclP2pImportShareableBuffer).

Memory allocated with `expandable_segments:True` or cudaMallocAsync has no IPC handle: `lacking` tries to get one.
"""

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvtransfer.cuda_handles import HANDLE_BYTES, PoolHandles

_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: the only flag


class _Handle(ctypes.Structure):
    """CUipcMemHandle; passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaDriver:
    """Implements cuda_handles.IpcDriver."""

    def lacking(self, pool: torch.Tensor) -> str | None:
        """Try to export the pool, and return why that fails, or None."""
        if pool.device.type != "cuda":
            return f"the KV pool is on {pool.device}, but cuda_ipc supports only CUDA"
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

    def export(self, pool: torch.Tensor) -> PoolHandles:
        """Return the handles; `offset` is the pool's position in its allocation."""
        with _context(pool.device):
            handle, offset = _handle_of(pool)
        return PoolHandles(pool.numel(), offset, handle)

    def open(self, handles: PoolHandles, device: str) -> "CudaPool":
        """See IpcDriver. Also raises OSError if the two devices have no peer access."""
        return CudaPool(handles, torch.device(device))


class CudaPool:
    """Owner of one mapping of a peer's pool, made so that the kernels of `device` can read it."""

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
                    text = f"{handles.num_bytes} bytes at {handles.offset} are not in an allocation of {size} bytes"
                    raise OSError(text)
                self.tensor = _bytes_at(self._base + handles.offset, handles.num_bytes, device)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Unmap. Raises OSError."""
        with self._lock:
            base, self._base = self._base, 0
        if base:
            self.tensor = torch.empty(0, dtype=torch.uint8)
            with _context(self._device):
                _call("cuIpcCloseMemHandle", ctypes.c_uint64(base))


def _bytes_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return memory as a tensor on `device`: torch's public functions would use the one that holds the memory."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, num_bytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)  # [num_bytes]


def _handle_of(pool: torch.Tensor) -> tuple[bytes, int]:
    """Return the handle of the allocation that contains the pool, and the pool's offset in it."""
    base, handle = _allocation_of(pool.data_ptr())[0], _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
    return bytes(handle), pool.data_ptr() - base


def _allocation_of(address: int) -> tuple[int, int]:
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    return base.value, size.value


@contextmanager
def _context(device: torch.device) -> Iterator[None]:
    """Make the device's primary context, which torch uses, current in this thread.

    Translates torch's exceptions in the block to OSError.
    """
    try:
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # a runtime call creates the context if there is none
            yield
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
