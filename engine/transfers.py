"""Copy values between host and device without waiting for the device's current work.

Both directions use pinned host memory where torch has an accelerator: other copies wait for the device, or are split
into pieces. torch keeps pinned memory until the copies that use it have ended.
"""

from collections.abc import Sequence

import torch

from devices.interface import Device


def upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return host `values` on `device`, ready for work launched from now on; no copy if `device` is the host."""
    if values.device == device:
        return values
    return (values.pin_memory() if _can_pin() else values).to(device, non_blocking=True)


def upload_ints(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return `values` as int64 on `device`."""
    return upload(torch.tensor(values, dtype=torch.int64), device)


class Download:
    """A step's results for the host, copied after the step's own work. One thread calls it."""

    def __init__(self, device: Device) -> None:
        self._event = device.event()
        self._pins = _can_pin()

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Return a host tensor that has these values once `end` was called and `wait` has returned."""
        kept = torch.empty(values.shape, dtype=values.dtype, pin_memory=self._pins)
        return kept.copy_(values, non_blocking=True)

    def end(self) -> None:
        """Mark the end of the copies; call it after the last `take`."""
        self._event.record()

    def wait(self) -> None:
        """Wait until all copies are done. Raises the device's error if it failed."""
        self._event.synchronize()


def _can_pin() -> bool:
    return torch.accelerator.is_available()
