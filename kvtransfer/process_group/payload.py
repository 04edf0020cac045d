"""All that touches pool bytes: into staging memory before they are sent, from it into the slots after they came.

Pools are host memory so far; a pool on a device needs its own kind of staging here and nothing else. Needs torch.
"""

import torch

from kvtransfer.digest import Place, StopFlag
from kvtransfer.staging import Staging

STAGING = ("cpu",)


class HostStaging:
    """Host memory of one link that its group sends from and receives into."""

    def __init__(self, num_bytes: int) -> None:
        memory = bytearray(num_bytes)
        self._tensor = torch.frombuffer(memory, dtype=torch.uint8)  # [num_bytes]
        self._staging = Staging(memoryview(memory))

    def tensor(self, start: int, num_bytes: int) -> torch.Tensor:
        """Return a part of it as the group takes it."""
        return self._tensor[start : start + num_bytes]  # [num_bytes]

    def write(self, start: int, data: bytes) -> None:
        """Put `data` at `start`."""
        self._staging.view[start : start + len(data)] = data

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return a copy of a part."""
        return bytes(self._staging.view[start : start + num_bytes])

    def gather(self, start: int, source: Place) -> None:
        """Copy the source's runs one after another to `start`."""
        self._staging.gather(start, source)

    def scatter(self, start: int, target: Place, stop: StopFlag, *, digests: bool) -> int | None:
        """Copy from `start` into the target's runs; return their digest (0 without), None when `stop` cut it short."""
        return self._staging.scatter(start, target, stop, digests=digests)
