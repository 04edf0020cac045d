"""All that touches pool bytes: into staging memory before they are sent, from it into the slots after they came.

A group of a device sends from that device's memory: pool -> staging -> group is one copy, and no byte leaves the device
but for its digest (kvtransfer/torch_mover.py). Needs torch.
"""

from typing import Protocol

import torch

from kvtransfer.device_staging import DeviceStaging
from kvtransfer.digest import RegionRuns, StopFlag
from kvtransfer.staging import Staging
from wire.errors import Unavailable


class GroupStaging(Protocol):
    """Memory of one link that its group sends from and receives into. One user at a time for any part of it."""

    @property
    def num_bytes(self) -> int:
        """All of it."""
        ...

    def tensor(self, start: int, num_bytes: int) -> torch.Tensor:
        """Return a part of it as the group takes it."""
        ...

    def write(self, start: int, data: bytes) -> None:
        """Put `data` at `start`."""
        ...

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return a copy of a part."""
        ...

    def gather(self, start: int, source: RegionRuns) -> None:
        """Copy the source's runs one after another to `start`; they are there when it returns."""
        ...

    def scatter(self, start: int, target: RegionRuns, stop: StopFlag, *, digests: bool) -> int | None:
        """Copy from `start` into the target's runs; return their digest (0 without), None when `stop` cut it short."""
        ...


def make_staging(device: torch.device | str, num_bytes: int, *, on_host: bool) -> GroupStaging:
    """Return host memory, or memory of the pool's own `device`, as the collective takes it.

    Raises Unavailable when the device has too little.
    """
    if on_host:
        return HostStaging(num_bytes)
    try:
        return DeviceStaging(num_bytes, device)
    except torch.OutOfMemoryError as error:
        raise Unavailable(f"no {num_bytes} bytes of staging memory on {device}: {error}") from error


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
