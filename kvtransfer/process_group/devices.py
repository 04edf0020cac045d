"""The devices of this process that have links: for each, one issuing thread and the turn to make the next group."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import TypeVar

from devices.collectives import Collective
from kvtransfer.interface import PoolMemory
from kvtransfer.process_group.issue import IssueQueue

_T = TypeVar("_T")
_IDLE_S = 1.0
MAX_UNFREED = 8


def device_of(memory: PoolMemory) -> str:
    """Return a pool's device: "cpu", or the `device` of a pool in device memory, such as "npu:0"."""
    return str(getattr(memory, "device", "cpu"))


class GroupDevice:
    """Shared by all links of one device, in both halves of an instance; it exists as long as any of these links."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.making = threading.Lock()  # held while a group of this device is made: one at a time
        self.sends_to: set[str] = set()  # groups that the sender's half is making
        self.unfreed: set[str] = set()  # groups that are closed and cannot be freed yet
        self._issue = IssueQueue(f"kv-issue-{name}")
        self._stream: Callable[[], AbstractContextManager[object]] | None = None
        self._lock = threading.Lock()

    def issue(self, task: Callable[[], _T]) -> "Future[_T]":
        """Run `task` on the device's issuing thread."""
        return self._issue.submit(task)

    def stream(self, collective: Collective) -> Callable[[], AbstractContextManager[object]]:
        """Return the stream on which all links of the device issue operations.

        torch has few streams. Nothing else is launched on this one, so all links can share it.
        """
        with self._lock:
            self._stream = self._stream or collective.new_stream(self.name)
            return self._stream

    def close(self) -> None:
        """End the issuing thread."""
        self._issue.close()


class Devices:
    """Owner of the devices in use. Each CPU pool counts as a device of its own, so that tests have several."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_use: dict[str, tuple[GroupDevice, int]] = {}

    def lease(self, memory: PoolMemory) -> "Lease":
        """Return a lease of the pool's device, which is created if it has no link yet."""
        name = device_of(memory)
        key = f"{name}/{id(memory)}" if name == "cpu" else name
        with self._lock:
            device, users = self._in_use.get(key) or (GroupDevice(name), 0)
            self._in_use[key] = (device, users + 1)
        return Lease(self, key, device, memory)

    def give_back(self, key: str) -> None:
        """Remove one user; the last one ends the device's thread."""
        with self._lock:
            device, users = self._in_use.pop(key)
            if users > 1:
                self._in_use[key] = (device, users - 1)
                return
        device.close()


class Lease:
    """The right of one link to use its device; keeps a reference to the pool that is the device's key."""

    def __init__(self, devices: Devices, key: str, device: GroupDevice, memory: PoolMemory) -> None:
        self._devices, self._key, self.device, self._memory = devices, key, device, memory
        self._over = threading.Lock()

    def release(self) -> None:
        """Give the device back; idempotent.

        A task still being issued, such as the creation of a group that outlasts its link, keeps the device until it has
        ended: otherwise the next link would have a second thread issue operations at the same time.
        """
        if not self._over.acquire(blocking=False):
            return
        idle = self.device.issue(_do_nothing)
        try:
            idle.result(_IDLE_S)
        except TimeoutError:
            idle.add_done_callback(lambda _: self._devices.give_back(self._key))
        else:
            self._devices.give_back(self._key)


def _do_nothing() -> None:
    pass


PROCESS_DEVICES = Devices()  # one per process, as a device's rules apply to the whole process
