"""HCCL as far as a CPU can show it: gloo underneath, and every rule of HCCL's that we know is enforced.

One thread issues all operations of a device; its communicators are made one after another; nothing can be aborted, so
an operation ends when the peer takes part, when the peer is gone, or after a very long time; some dtypes only.
A failed operation ends the process unless torch_npu is set otherwise (ProcessGroupHCCL.cpp: checkHcclComms,
WorkHCCL::handleException; its default is 1, tear down).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch

from devices.collectives import COLLECTIVES, Collective, set_hccl_defaults

_DTYPES = {
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64,
}  # fmt: skip
_EXEC_TIMEOUT = timedelta(seconds=60)


class RuleBroken(RuntimeError):
    """Something was done that HCCL forbids."""


@dataclass
class HcclRules:
    """Owner of what each device is doing; `broken` lists what went against the rules."""

    free_bytes: int | None = None
    broken: list[str] = field(default_factory=list)
    made: int = 0
    make_s: float = 0.0
    slow_s: float = 0.0  # that long each creation takes
    _tears_down: bool = True
    _threads: dict[str, threading.Thread] = field(default_factory=dict)
    _busy: dict[str, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def collective(self) -> Collective:
        """The table's hccl, with gloo underneath and staging in host memory."""
        return replace(
            COLLECTIVES["hccl"],
            on_host=True,
            lacking=lambda: None,
            make=self.make,
            free_bytes=lambda _: self.free_bytes,
            make_s=self.make_s,
        )

    def make(self, store: Any, rank: int, of: int, host: str, timeout_s: float, device: str) -> "RuleBoundGroup":
        environ: dict[str, str] = {}
        set_hccl_defaults(environ)
        self._tears_down = environ.get("TORCH_HCCL_ASYNC_ERROR_HANDLING", "1") in "13"
        with self.issuing(device, "creation"):
            self.made += 1
            threading.Event().wait(self.slow_s)
            return RuleBoundGroup(COLLECTIVES["gloo"].make(store, rank, of, host, timeout_s, device), device, self)

    def failed(self, error: str) -> None:
        """What torch_npu's watchdog does about a failed operation."""
        if self._tears_down:
            self.broken.append(f"the process would have been ended: {error}")

    @contextmanager
    def issuing(self, device: str, what: str) -> Iterator[None]:
        """Hold the device for one operation."""
        me = threading.current_thread()
        with self._lock:
            owner = self._threads.setdefault(device, me)
            if owner is not me and owner.is_alive():
                self._break(f"{what} on {device} by {me.name}, which {owner.name} issues for")
            self._threads[device] = me
            if device in self._busy:
                self._break(f"{what} on {device} during {self._busy[device]}")
            self._busy[device] = what
        try:
            yield
        finally:
            with self._lock:
                self._busy.pop(device, None)

    def _break(self, what: str) -> None:
        self.broken.append(what)
        raise RuleBroken(what)

    def check(self, device: str, tensors: list[torch.Tensor]) -> None:
        if len(tensors) != 1 or tensors[0].dtype not in _DTYPES or not tensors[0].is_contiguous():
            with self._lock:
                self._break(f"{[tensor.dtype for tensor in tensors]} on {device}")


class RuleBoundGroup:
    """A group that can send and receive, and nothing else."""

    def __init__(self, group: Any, device: str, rules: HcclRules) -> None:
        self._group, self._device, self._rules = group, device, rules

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> "RuleBoundWork":
        with self._rules.issuing(self._device, "send"):
            self._rules.check(self._device, tensors)
            return RuleBoundWork(self._group.send(tensors, peer, tag), self._rules)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> "RuleBoundWork":
        with self._rules.issuing(self._device, "recv"):
            self._rules.check(self._device, tensors)
            return RuleBoundWork(self._group.recv(tensors, peer, tag), self._rules)

    def abort(self) -> None:
        self._rules._break("abort, which HCCL does not have")


class RuleBoundWork:
    """An operation in progress; a wait for it takes as long as it does."""

    def __init__(self, work: Any, rules: HcclRules) -> None:
        self._work, self._rules, self._error, self._over = work, rules, "", threading.Event()
        threading.Thread(target=self._wait, name="hccl-work", daemon=True).start()

    def is_completed(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        self._over.wait(None if timeout is None else timeout.total_seconds())
        if self._error:
            raise RuntimeError(self._error)

    def _wait(self) -> None:
        try:
            self._work.wait(_EXEC_TIMEOUT)
        except RuntimeError as error:
            self._error = str(error)
            self._rules.failed(self._error)
        self._work = None
        self._over.set()
