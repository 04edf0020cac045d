"""Memory on a device that a child process maps too: host memory as a memfd; other kinds have their own handles."""

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The owner's side. A child maps it with `handle` and `fds`; `free` is called after the child's end."""

    tensor: "torch.Tensor"  # uint8, [num_bytes]
    handle: str
    fds: tuple[int, ...]
    free: Callable[[], None]


def share_host_memory(num_bytes: int) -> SharedMemory:
    """Allocate host memory. Raises OSError."""
    fd = os.memfd_create("pdserve-shared", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, num_bytes)
        return SharedMemory(map_host_memory(fd, num_bytes), "", (fd,), lambda: os.close(fd))
    except BaseException:
        os.close(fd)
        raise


def map_host_memory(fd: int, num_bytes: int) -> "torch.Tensor":
    """Return the memory that another process allocated; the last tensor that refers to it unmaps it. Raises OSError."""
    import torch

    return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)  # [num_bytes]
