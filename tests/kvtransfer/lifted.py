"""A TorchMover for the contract of movers (test_digest.py), with the test's memory copied to a device first."""

import torch

from kvtransfer.device_memory import DeviceRegion
from kvtransfer.digest import Region, RegionRuns, StopFlag
from kvtransfer.torch_mover import TorchMover


class LiftedMover:
    """Moves between memory of two devices, None being the host; copies what was written back to the test's memory."""

    name = "torch"

    def __init__(self, source: str | None, target: str | None) -> None:
        self._mover, self._source, self._target = TorchMover(piece_bytes=256 << 10), source, target

    def digest(self, place: RegionRuns) -> int:
        return self._mover.digest(_to_device(place, self._source))

    def copy(self, source: RegionRuns, target: RegionRuns, stop: StopFlag) -> bool:
        lifted = _to_device(target, self._target)
        moved = self._mover.copy(_to_device(source, self._source), lifted, stop)
        _copy_back(lifted.region, target.region)
        return moved

    def copy_and_digest(self, source: RegionRuns, target: RegionRuns, stop: StopFlag) -> int | None:
        lifted = _to_device(target, self._target)
        digest = self._mover.copy_and_digest(_to_device(source, self._source), lifted, stop)
        _copy_back(lifted.region, target.region)
        return digest


def on_device(region: Region, device: str) -> DeviceRegion:
    """Return the same bytes in memory of `device`: on the CPU the same memory, unless it is read-only."""
    data = region.view if not region.readonly else memoryview(bytearray(region.view))
    tensor = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
    return DeviceRegion(tensor.to(device), readonly=region.readonly)


def _to_device(place: RegionRuns, device: str | None) -> RegionRuns:
    return place if device is None else place._replace(region=on_device(place.region, device))


def _copy_back(lifted: Region, region: Region) -> None:
    if isinstance(lifted, DeviceRegion) and lifted.tensor.device.type != "cpu" and not region.readonly:
        region.view[:] = bytes(lifted.tensor.cpu().numpy())
