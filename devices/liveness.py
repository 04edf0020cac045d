"""Whether a device still computes: a tiny op on it, waited for on a thread of its own, so that the wait has an end.

An error of a kernel (an access outside its memory) or of the driver (a card that is gone) stays with a process: every
call after it fails or never returns. Such a device cannot be mended from within the process.
"""

import threading
from typing import TYPE_CHECKING

from devices.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from devices.interface import Device

THREAD = "device-touch"
"""The thread's name: where the device does not answer, it stays in native code for as long as the process lives."""


class LivenessCheck:
    """Tries one device. Takes its memory at once: a device that is full can be touched, too. Imports torch."""

    def __init__(self, device: "Device") -> None:
        import torch

        self._device = device
        self._tensor = torch.zeros(1, dtype=torch.int32, device=device.torch_device)

    def why_not(self, timeout_s: float) -> str | None:
        """Return, in words, why the device computes no more, or None where it does. Waits `timeout_s` at most."""
        said: list[BaseException] = []
        thread = threading.Thread(target=self._try, args=(said,), name=THREAD, daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            return f"{self._device.name} did not do a tiny op within {timeout_s:g} s"
        if not said or is_out_of_memory(said[0]):
            return None
        return f"{self._device.name} does not even do a tiny op: {in_a_line(said[0])}"

    def _try(self, said: list[BaseException]) -> None:
        try:
            self._device.activate()
            self._tensor.add_(1)
            done = self._device.event()
            done.record()
            done.synchronize()
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame: `why_not` says it
            said.append(error)


def in_a_line(error: BaseException) -> str:
    """Return what an error says first: drivers add advice to developers."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
