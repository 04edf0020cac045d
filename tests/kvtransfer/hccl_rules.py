"""HCCL as far as a CPU can show it: gloo underneath, and every rule of HCCL's and torch_npu's that we know is enforced.

From torch_npu's ProcessGroupHCCL.cpp, 2026-08, with whose header and symbols the wheel of 2.13 agrees:
- the first operation creates the communicator, within the call, and waits there for the peer (pointToPoint ->
  getHCCLComm -> createHCCLComm -> HcclCommInitRootInfoConfig); there is no abort
- the operations of a process pass through one queue (NPUQueue.cpp: Repository::Enqueue, one consumer thread), so one
  that hangs stops all others of that process, of any group
- an operation ends on its stream, some time after its data moved (WorkHCCL::finishedNPUExecutionInternal)
- a failed operation ends the process unless torch_npu is set otherwise (checkHcclComms, WorkHCCL::handleException; its
  default is 1, tear down: OptionsManager.cpp, GetHcclAsyncErrorHandling)

From HCCL's documents: one thread of a process issues all operations of a device, and its communicators are made
one after another (HcclSend); some dtypes only; two processes cannot listen on the one default port of an NPU
(HCCL_NPU_SOCKET_PORT_RANGE).

The rules are those of one machine: what a process does is noted in `folder`, and files there make creations go wrong.
"""

import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch

from devices.collectives import COLLECTIVES, Collective
from kvtransfer.process_group import child

_DTYPES = {
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64,
}  # fmt: skip
_EXEC_TIMEOUT = timedelta(seconds=60)
_LATE_S = 0.002
FOLDER = "PDSERVE_TEST_HCCL"
PROGRAM = "tests.kvtransfer.hccl_rules"
"""The product's process of a group, with these rules."""


Fault = Literal["hangs", "dies", "fails"]


class RuleBroken(RuntimeError):
    """Something was done that HCCL forbids."""


@dataclass
class HcclRules:
    """Owner of what each device of this process is doing; `folder` is common to all processes."""

    folder: Path
    free_bytes: int | None = None
    on_host: bool = True
    make_s: float = 60.0
    _threads: dict[str, threading.Thread] = field(default_factory=dict)
    _ports: dict[str, int] = field(default_factory=dict)
    _queue: threading.Lock = field(default_factory=threading.Lock)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def made(self) -> int:
        """The number of communicators that were created."""
        return len(self._notes("made"))

    @property
    def broken(self) -> list[str]:
        """What went against the rules."""
        return self._notes("broken")

    @property
    def pids(self) -> list[int]:
        """The processes that created one, or tried to, in their order."""
        return [int(note) for note in self._notes("pid")]

    def break_device(self, device: str, how: Fault) -> None:
        """From now on creations on this device hang for good, end their process, or fail."""
        (self.folder / f"{device} {how}").touch()

    def repair(self, device: str) -> None:
        """From now on creations on this device work again."""
        for path in self.folder.glob(f"{device} *"):
            path.unlink()

    def collective(self) -> Collective:
        """The table's hccl, with gloo underneath; `lazy` is false because sums then name the device of a tensor."""
        return replace(
            COLLECTIVES["hccl"],
            on_host=self.on_host,
            lacking=lambda: None,
            make=self.make,
            free_bytes=lambda _: self.free_bytes,
            make_s=self.make_s,
            lazy=False,
        )

    def make(self, store: Any, rank: int, of: int, host: str, timeout_s: float, device: str) -> "RuleBoundGroup":
        def create() -> Any:
            self.note("pid", str(os.getpid()))
            self._listen(device)
            if (self.folder / f"{device} dies").exists():
                os.kill(os.getpid(), signal.SIGKILL)
            while (self.folder / f"{device} hangs").exists():
                time.sleep(0.05)
            if (self.folder / f"{device} fails").exists():
                raise RuntimeError("EI0006: getting socket times out")
            group = COLLECTIVES["gloo"].make(store, rank, of, host, timeout_s, device)
            self.note("made", device)
            return group

        return RuleBoundGroup(create, device, self)

    def failed(self, error: str) -> None:
        """What torch_npu's watchdog does about a failed operation."""
        if os.environ.get("TORCH_HCCL_ASYNC_ERROR_HANDLING", "1") in "13":
            self.note("broken", f"the process would have been ended: {error}")

    @contextmanager
    def issuing(self, device: str, what: str) -> Iterator[None]:
        """Pass through the queue of the process, as the only thread that issues for the device."""
        me = threading.current_thread()
        with self._lock:
            owner = self._threads.setdefault(device, me)
            if owner is not me and owner.is_alive():
                self._break(f"{what} on {device} by {me.name}, which {owner.name} issues for")
            self._threads[device] = me
        with self._queue:
            yield

    def check(self, device: str, tensors: list[torch.Tensor]) -> None:
        if len(tensors) != 1 or tensors[0].dtype not in _DTYPES or not tensors[0].is_contiguous():
            self._break(f"{[tensor.dtype for tensor in tensors]} on {device}")

    def note(self, kind: str, text: str) -> None:
        with (self.folder / "notes").open("a") as notes:
            notes.write(f"{kind} {text}\n")

    def _notes(self, kind: str) -> list[str]:
        path = self.folder / "notes"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.removeprefix(f"{kind} ") for line in lines if line.startswith(f"{kind} ")]

    def _break(self, what: str) -> None:
        self.note("broken", what)
        raise RuleBroken(what)

    def _listen(self, device: str) -> None:
        if os.environ.get("HCCL_NPU_SOCKET_PORT_RANGE") == "auto" or device in self._ports:
            return
        port = os.open(self.folder / f"16666 of {device}", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(port, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(port)
            raise RuntimeError(f"port 16666 of {device} is in use") from None
        self._ports[device] = port


class RuleBoundGroup:
    """A group that can send, receive and sum, and nothing else."""

    def __init__(self, create: Callable[[], Any], device: str, rules: HcclRules) -> None:
        self._create, self._rules = create, rules
        self._device = f"cpu of {id(self)}" if device == "cpu" else device  # sums of two instances in a test's process
        self._group: Any = None

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> "RuleBoundWork":
        return self._run("send", tensors, lambda group: group.send(tensors, peer, tag))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> "RuleBoundWork":
        return self._run("recv", tensors, lambda group: group.recv(tensors, peer, tag))

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> "RuleBoundWork":
        return self._run("allreduce", tensors, lambda group: group.allreduce(tensors, options))

    def abort(self) -> None:
        self._rules._break("abort, which HCCL does not have")

    def _run(self, what: str, tensors: list[torch.Tensor], run: Callable[[Any], Any]) -> "RuleBoundWork":
        with self._rules.issuing(self._device, what):
            self._rules.check(self._device, tensors)
            if self._group is None:
                self._group = self._create()
            return RuleBoundWork(run(self._group), self._rules)


class RuleBoundWork:
    """An operation in progress; a wait for it takes as long as it does."""

    def __init__(self, work: Any, rules: HcclRules) -> None:
        self._work, self._rules, self._error, self._ended = work, rules, "", threading.Event()
        threading.Thread(target=self._wait, name="hccl-work", daemon=True).start()

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        self._ended.wait(None if timeout is None else timeout.total_seconds())
        if self._error:
            raise RuntimeError(self._error)

    def _wait(self) -> None:
        try:
            self._work.wait(_EXEC_TIMEOUT)
            time.sleep(_LATE_S)
        except RuntimeError as error:
            self._error = str(error)
            self._rules.failed(self._error)
        self._work = None
        self._ended.set()


def install(*, on_host: bool = True) -> None:
    """Replace HCCL in this process, by the rules of the folder that the environment names."""
    COLLECTIVES["hccl"] = HcclRules(Path(os.environ[FOLDER]), on_host=on_host).collective()


if __name__ == "__main__":
    install()
    os._exit(child.main(sys.argv[1:]))
