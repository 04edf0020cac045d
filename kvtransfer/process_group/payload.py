"""The only code of the process group that accesses pool bytes: copies them to staging memory and from it to the slots.

A device's group sends from that device's memory: pool -> staging -> group is one copy. The bytes are copied to the host
only for a digest (kvtransfer/torch_mover.py). Needs torch.
"""

from typing import Protocol

import torch

from devices.shared_memory import SharedMemory
from devices.table import open_device
from kvtransfer.device_staging import DeviceStaging
from kvtransfer.digest import RegionRuns, StopFlag
from kvtransfer.staging import Staging
from wire.errors import Unavailable


class GroupStaging(Protocol):
    """Memory of one link that its group sends from and receives into. Each part has one user at a time."""

    @property
    def num_bytes(self) -> int:
        """Its size."""
        ...

    def tensor(self, start: int, num_bytes: int) -> torch.Tensor:
        """Return a part of it as a tensor for the group."""
        ...

    def write(self, start: int, data: bytes) -> None:
        """Write `data` at `start`."""
        ...

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return a copy of a part of it."""
        ...

    def gather(self, start: int, source: RegionRuns) -> None:
        """Copy the source's runs to `start`, one after another; the copy is complete when it returns."""
        ...

    def scatter(self, start: int, target: RegionRuns, stop: StopFlag, *, digests: bool) -> int | None:
        """Copy from `start` to the target's runs; return their digest (0 without `digests`), None if `stop` was set."""
        ...


def make_staging(device: torch.device | str, num_bytes: int, *, on_host: bool) -> GroupStaging:
    """Return host memory, or memory on the pool's `device`, as the collective requires.

    Raises Unavailable if the device has too little.
    """
    if on_host:
        return HostStaging(num_bytes)
    try:
        return DeviceStaging(num_bytes, device)
    except torch.OutOfMemoryError as error:
        raise Unavailable(f"cannot allocate {num_bytes} bytes of staging memory on {device}: {error}") from error


def share_staging(device: torch.device | str, num_bytes: int) -> tuple[SharedMemory, GroupStaging]:
    """Return memory on `device` that a child process can map, and the staging in it. Raises Unavailable."""
    try:
        memory = open_device(str(device)).share_memory(num_bytes)
    except (OSError, RuntimeError) as error:
        raise Unavailable(f"cannot allocate {num_bytes} bytes of shared staging memory on {device}: {error}") from error
    return memory, DeviceStaging(num_bytes, device, memory=memory.tensor)


class HostStaging:
    """Host memory."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        memory = bytearray(num_bytes)
        self._tensor = torch.frombuffer(memory, dtype=torch.uint8)  # [num_bytes]
        self._staging = Staging(memoryview(memory))

    def tensor(self, start: int, num_bytes: int) -> torch.Tensor:
        """See GroupStaging."""
        return self._tensor[start : start + num_bytes]  # [num_bytes]

    def write(self, start: int, data: bytes) -> None:
        """See GroupStaging."""
        self._staging.view[start : start + len(data)] = data

    def read(self, start: int, num_bytes: int) -> bytes:
        """See GroupStaging."""
        return bytes(self._staging.view[start : start + num_bytes])

    def gather(self, start: int, source: RegionRuns) -> None:
        """See GroupStaging."""
        self._staging.gather(start, source)

    def scatter(self, start: int, target: RegionRuns, stop: StopFlag, *, digests: bool) -> int | None:
        """See GroupStaging."""
        return self._staging.scatter(start, target, stop, digests=digests)
