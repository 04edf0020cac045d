"""Staging memory on a device: contiguous, gathered into and scattered from, for a group or mooncake. Needs torch."""

import torch

from kvtransfer.device_memory import DeviceRegion
from kvtransfer.digest import Region, RegionRuns, StopFlag
from kvtransfer.mover import process_mover
from kvtransfer.staging import move, whole

_NEVER = StopFlag()


class DeviceStaging:
    """Device memory. Every move has completed when it returns, so other streams and readers need not wait for it.

    It starts at a multiple of `alignment` bytes, or is the given `memory`.
    """

    def __init__(
        self, num_bytes: int, device: torch.device | str, alignment: int = 1, memory: torch.Tensor | None = None
    ) -> None:
        self.num_bytes = num_bytes
        if memory is None:
            memory = torch.empty(num_bytes + alignment - 1, dtype=torch.uint8, device=device)
        start = -memory.data_ptr() % alignment
        self._tensor = memory[start : start + num_bytes]  # [num_bytes]
        self._region = DeviceRegion(self._tensor)

    @property
    def address(self) -> int:
        """Address of the first byte, for a library; host code cannot access it."""
        return self._tensor.data_ptr()

    def tensor(self, start: int, num_bytes: int) -> torch.Tensor:
        """See GroupStaging."""
        return self._tensor[start : start + num_bytes]  # [num_bytes]

    def write(self, start: int, data: bytes) -> None:
        """See GroupStaging."""
        self.gather(start, RegionRuns(Region(data), 0, whole(len(data))))

    def read(self, start: int, num_bytes: int) -> bytes:
        """See GroupStaging."""
        data = bytearray(num_bytes)
        self.scatter(start, RegionRuns(Region(data), 0, whole(num_bytes)), _NEVER, digests=False)
        return bytes(data)

    def gather(self, start: int, source: RegionRuns) -> None:
        """See GroupStaging."""
        process_mover().copy(source, RegionRuns(self._region, start, whole(source.runs.num_bytes)), _NEVER)

    def scatter(self, start: int, target: RegionRuns, stop: StopFlag, *, digests: bool) -> int | None:
        """See GroupStaging."""
        return move(RegionRuns(self._region, start, whole(target.runs.num_bytes)), target, stop, digests=digests)
