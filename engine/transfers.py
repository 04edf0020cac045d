"""Values between the host and a device without waiting for what the device is doing.

Both ways by pinned host memory where torch has a device to pin it for: other copies wait for the device, or are made
piece by piece. torch keeps pinned memory until the copies that use it have ended.
"""

from collections.abc import Sequence

import torch

from devices.interface import Device


def upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the host's `values` on `device`, there before what is launched from now on. The host's own is no copy."""
    if values.device == device:
        return values
    return (values.pin_memory() if _pins() else values).to(device, non_blocking=True)


def upload_ints(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return `values` as int64 on `device`."""
    return upload(torch.tensor(values, dtype=torch.int64), device)


class Download:
    """What a step leaves for the host, copied behind the step's own work. One thread calls it."""

    def __init__(self, device: Device) -> None:
        self._event = device.event()
        self._pins = _pins()

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the host that will have these values once `wait` returns, if `end` was called since."""
        kept = torch.empty(values.shape, dtype=values.dtype, pin_memory=self._pins)
        return kept.copy_(values, non_blocking=True)

    def end(self) -> None:
        """All is taken."""
        self._event.record()

    def wait(self) -> None:
        """Block until all that was taken is there. Raises what the device failed with."""
        self._event.synchronize()


def _pins() -> bool:
    return torch.accelerator.is_available()
