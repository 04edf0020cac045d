"""Check that a device still works: run a small op on a separate thread, so that the wait for it has a deadline.

After a kernel's error (an access outside its memory) or a driver's (a lost card), every later call in the process fails
or never returns. Such a device cannot be recovered from within the process.
"""

import threading
import time
import weakref
from typing import TYPE_CHECKING, Protocol

from devices.out_of_memory import is_out_of_memory
from devices.polling import wait_until

if TYPE_CHECKING:
    from devices.interface import Device

THREAD = "device-touch"
"""The thread's name. If the device does not respond, the thread stays in native code until the process exits."""


class LivenessCheck:
    """Checks one device. Allocates its tensor at construction, so that a full device can be checked. Imports torch."""

    def __init__(self, device: "Device") -> None:
        import torch

        self._device = device
        self._tensor = torch.zeros(1, dtype=torch.int32, device=device.torch_device)

    def why_not(self, timeout_s: float) -> str | None:
        """Return why the device no longer works, or None if it does. Waits at most `timeout_s`."""
        errors: list[BaseException] = []
        thread = threading.Thread(target=self._run_once, args=(errors,), name=THREAD, daemon=True)
        thread.start()
        if not wait_until(lambda: not thread.is_alive(), timeout_s):
            return f"{self._device.name} did not finish a small test op within {timeout_s:g} s"
        if not errors or is_out_of_memory(errors[0]):
            return None
        return f"{self._device.name} fails a small test op: {in_a_line(errors[0])}"

    def _run_once(self, errors: list[BaseException]) -> None:
        try:
            self._device.activate()
            self._tensor.add_(1)
            done = self._device.event()
            done.record()
            done.synchronize()
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame: `why_not` reports it
            errors.append(error)


class PeriodicCheck(Protocol):
    """Checks something on a device."""

    def check(self) -> bool:
        """Check now; return whether there is more to check later."""
        ...


def check_periodically(watch: PeriodicCheck, interval_s: float, thread_name: str) -> None:
    """Start a thread that calls `watch.check()` until it returns False or the watch is deleted.

    The thread holds no reference to the watch between checks, so that deleting the watch ends the thread.
    """
    arguments = (weakref.ref(watch), interval_s)
    threading.Thread(target=_check_while_alive, args=arguments, name=thread_name, daemon=True).start()


def _check_while_alive(watch: "weakref.ref[PeriodicCheck]", interval_s: float) -> None:
    while True:
        time.sleep(interval_s)
        found = watch()
        if found is None or not found.check():
            return
        del found


def in_a_line(error: BaseException) -> str:
    """Return an error's type and the first line of its text: drivers append advice for developers."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
