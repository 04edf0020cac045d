"""This process's mover for any memory: host memory by native functions, device memory by torch.

torch is imported when bytes in device memory are first moved: a process whose pools are in host memory never loads it.
"""

import functools
import os

from kvtransfer.device_memory import DeviceRegion
from kvtransfer.digest import Mover, RegionRuns, StopFlag, make_mover


@functools.cache
def process_mover() -> Mover:
    """Return this process's mover, made at the first call: the Python one if the native functions are not built yet."""
    return AnyMover(make_mover(os.environ))


class AnyMover:
    """Implements digest.Mover: places in host memory go to `host`, all others to this process's TorchMover."""

    def __init__(self, host: Mover) -> None:
        self._host = host

    @property
    def name(self) -> str:
        """Name of the mover of host memory."""
        return self._host.name

    def digest(self, place: RegionRuns) -> int:
        """See Mover."""
        mover = _device_mover() if isinstance(place.region, DeviceRegion) else self._host
        return mover.digest(place)

    def copy(self, source: RegionRuns, target: RegionRuns, stop: StopFlag) -> bool:
        """See Mover."""
        return self._mover_for(source, target).copy(source, target, stop)

    def copy_and_digest(self, source: RegionRuns, target: RegionRuns, stop: StopFlag) -> int | None:
        """See Mover."""
        return self._mover_for(source, target).copy_and_digest(source, target, stop)

    def _mover_for(self, source: RegionRuns, target: RegionRuns) -> Mover:
        if isinstance(source.region, DeviceRegion) or isinstance(target.region, DeviceRegion):
            return _device_mover()
        return self._host


@functools.cache
def _device_mover() -> Mover:
    from kvtransfer.torch_mover import TorchMover

    return TorchMover()
