"""The devices of this process that carry links: for each, one issuing thread and the turn to make the next link."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kvtransfer.interface import PoolMemory
from kvtransfer.process_group.issue import IssueQueue

_T = TypeVar("_T")
_IDLE_S = 1.0


def device_of(memory: PoolMemory) -> str:
    """Return where a pool lies: "cpu" or, once pools lie on devices, their `device`, such as "npu:0"."""
    return str(getattr(memory, "device", "cpu"))


class GroupDevice:
    """Shared by all links of one device, of both halves of an instance; lives while one of them does."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.making = threading.Lock()  # held while a link of this device is made: one after another
        self._issue = IssueQueue(f"kv-issue-{name}")

    def issue(self, task: Callable[[], _T]) -> "Future[_T]":
        """Run `task` on the device's issuing thread."""
        return self._issue.submit(task)

    def close(self) -> None:
        """End the issuing thread."""
        self._issue.close()


class Devices:
    """Owner of the devices in use. A CPU pool counts as a device of its own, so that tests have several."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_use: dict[str, tuple[GroupDevice, int]] = {}

    def lease(self, memory: PoolMemory) -> "Lease":
        """Return the pool's device, made when it has no link yet."""
        name = device_of(memory)
        key = f"{name}/{id(memory)}" if name == "cpu" else name
        with self._lock:
            device, users = self._in_use.get(key) or (GroupDevice(name), 0)
            self._in_use[key] = (device, users + 1)
        return Lease(self, key, device, memory)

    def give_back(self, key: str) -> None:
        """One user less; the last one ends the device's thread."""
        with self._lock:
            device, users = self._in_use.pop(key)
            if users > 1:
                self._in_use[key] = (device, users - 1)
                return
        device.close()


class Lease:
    """The right of one link to use its device; it keeps the pool that is the device's key."""

    def __init__(self, devices: Devices, key: str, device: GroupDevice, memory: PoolMemory) -> None:
        self._devices, self._key, self.device, self._memory = devices, key, device, memory
        self._over = threading.Lock()

    def release(self) -> None:
        """Give the device back; idempotent.

        What is still being issued, as the creation of a group that outlasts its link, keeps it till that has ended:
        else the next link would have a second thread issue beside it.
        """
        if not self._over.acquire(blocking=False):
            return
        idle = self.device.issue(_nothing)
        try:
            idle.result(_IDLE_S)
        except TimeoutError:
            idle.add_done_callback(lambda _: self._devices.give_back(self._key))
        else:
            self._devices.give_back(self._key)


def _nothing() -> None:
    pass


PROCESS_DEVICES = Devices()  # of the process, as a device's rules are: they hold for all that it does there
