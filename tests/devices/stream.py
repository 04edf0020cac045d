"""The fake device with a stream: what is launched is computed, but the host sees its end only at an event.

Each rule, with the function of torch's or torch_npu's sources that it rests on:

    a sum with `asyncOp` off is enqueued on the current stream, and returns None: ProcessGroupNCCL::collective
    torch_npu returns a work all the same, and the current stream is not behind the sum before the work's `wait`:
        ProcessGroupHCCL::collective, WorkHCCL::synchronizeInternal
    a work's `wait` with a timeout, and `is_completed`, are the host's: WorkNCCL::wait, WorkNCCL::isCompleted
    the sum of a peer that never joins does not end, nor does any work behind it: ncclAllReduce enqueues a kernel
    a device's error shows at the next query or wait of an event: CUDAEvent::query, CUDAEvent::synchronize
    `abort` ends the kernels and no more sums are accepted: ProcessGroupNCCL::abort, NCCLComm::getNcclComm
    the group's own timeout makes a hung work look done: WorkNCCL::checkTimeout; ours is not passed to it
    what is `ahead` of it in the device's queue may be of another stream: torch takes streams from a pool of 32, in turn
        (CUDAStream.cpp: getStreamFromPool), and a device runs them over fewer connections

The time that a sum takes on the device passes within its launch here, so that the values behind it are right.
"""

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import AllreduceOptions

from devices.collectives import COLLECTIVES, Collective
from devices.interface import Traits
from tests.devices.fake_device import TRAITS, VISIBLE, CardDevice, FakeKind

_LIMIT_S = 60.0
_LATE_QUERIES = 3
NPU_LIKE = "hccl"


@dataclass
class Stream:
    """What happened on the stream, in order: "sum", "event", and "host waits". `join_s`: how long a sum takes at most.

    A sum that no peer joined in time hangs: nothing behind it is done until the group is aborted. `fault`: at the sum
    of this number, the process sends itself this signal. `error` is the device's; sums are `refused` with that reason.
    `ahead`: set by the end of operations that share the stream's queue.
    """

    join_s: float = 30.0
    fault: tuple[int, int] | None = None
    log: list[str] = field(default_factory=list)
    error: str | None = None
    refused: str | None = None
    aborted: bool = False
    ahead: list[threading.Event] = field(default_factory=list)
    _hung: bool = False
    _ended: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def watched(self) -> Iterator[list[str]]:
        """Yield what happens within the block."""
        begin, seen = len(self.log), list[str]()
        yield seen
        seen += self.log[begin:]

    @property
    def is_hung(self) -> bool:
        return self._hung and not self.aborted

    def sum(self) -> None:
        """Note a sum."""
        self.log.append("sum")
        if self.fault is not None and self.log.count("sum") == self.fault[0]:
            os.kill(os.getpid(), self.fault[1])

    def hang(self) -> None:
        self._hung = True

    def abort(self) -> None:
        self.aborted = True
        self._ended.set()

    def wait(self) -> None:
        """Wait as the host does: for ever if a sum hangs."""
        self.check()
        if self.is_hung:
            assert self._ended.wait(_LIMIT_S), "the host waits for a sum that never ends"

    def check(self) -> None:
        if self.error is not None:
            raise RuntimeError(self.error)


STREAM = Stream()
"""The stream of this process's device."""


class StreamKind(FakeKind):
    """The fake device's kind with a stream; `traits` names the collective of its ranks. Each open is another device."""

    def __init__(self, collective: str = "nccl") -> None:
        super().__init__(replace(TRAITS, visible_variable=VISIBLE, is_asynchronous=True, collective=collective))
        self._numbers = itertools.count()

    def open(self, index: int = 0) -> "StreamDevice":
        return StreamDevice(next(self._numbers), self.traits, self.total_bytes)


@dataclass
class StreamDevice(CardDevice):
    """Implements Device."""

    traits: Traits = field(default_factory=lambda: StreamKind().traits)
    stream: Stream = field(default_factory=lambda: STREAM)

    def event(self) -> "StreamEvent":  # type: ignore[override]
        return StreamEvent(self.stream)

    def synchronize(self) -> None:
        self.stream.log.append("host waits")
        self.stream.wait()


class StreamEvent:
    """Implements Event: it is done some queries late, and never behind a sum that hangs."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._queries, self._is_behind = stream, 0, False
        self._ahead: list[threading.Event] = []

    def record(self) -> None:
        self._stream.log.append("event")
        self._is_behind = self._stream.is_hung
        self._ahead = [one for one in self._stream.ahead if not one.is_set()]

    def wait(self) -> None:
        pass

    def synchronize(self) -> None:
        self._stream.log.append("host waits")
        for one in self._ahead:
            assert one.wait(_LIMIT_S), "the host waits for an operation that never ends"
        if self._is_behind:
            self._stream.wait()
        self._stream.check()

    @property
    def is_done(self) -> bool:
        self._stream.log.append("host waits")
        self._stream.check()
        self._queries += 1
        is_blocked = any(not one.is_set() for one in self._ahead) or (self._is_behind and self._stream.is_hung)
        return self._queries > _LATE_QUERIES and not is_blocked


class StreamGroup:
    """A group as nccl and hccl are, with gloo underneath."""

    def __init__(self, gloo: Any, stream: Stream, *, returns_works: bool) -> None:
        self._gloo, self._stream, self._returns_works = gloo, stream, returns_works

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> "StreamWork | None":
        (tensor,) = tensors
        assert tensor.is_contiguous(), "a sum is over one piece of memory"
        assert not options.asyncOp, "nccl would sum beside the current stream"
        assert options.timeout.total_seconds() <= 0 or options.timeout >= timedelta(minutes=5), "torch would end it"
        self._stream.sum()
        if self._stream.refused is not None:
            raise RuntimeError(self._stream.refused)
        if self._stream.aborted:
            raise RuntimeError("NCCL communicator was aborted on rank 0.")
        summed = tensor.clone() if self._returns_works else tensor
        if not self._stream.is_hung:
            self._sum(summed)
        if not self._returns_works:
            return None
        tensor.fill_(1 if tensor.dtype == torch.int32 else float("nan"))
        return StreamWork(tensor, summed, self._stream)

    def abort(self) -> None:
        self._stream.abort()

    def _sum(self, tensor: torch.Tensor) -> None:
        options = AllreduceOptions()
        options.timeout = timedelta(seconds=self._stream.join_s)
        try:
            self._gloo.allreduce([tensor], options).wait()
        except RuntimeError:
            self._stream.hang()


class StreamWork:
    """A sum on another stream."""

    def __init__(self, target: torch.Tensor, summed: torch.Tensor, stream: Stream) -> None:
        self._target, self._summed, self._stream = target, summed, stream

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is not None:
            self._stream.log.append("host waits")
            self._stream.wait()
        self._target.copy_(self._summed)

    def is_completed(self) -> bool:
        self._stream.log.append("host waits")
        return not self._stream.is_hung


def stream_collective(name: str, stream: Stream = STREAM) -> Collective:
    """The table's nccl or hccl over the fake stream."""

    def make(store: Any, rank: int, of: int, host: str, timeout_s: float, device: str) -> StreamGroup:
        gloo = COLLECTIVES["gloo"].make(store, rank, of, host, timeout_s, device)
        return StreamGroup(gloo, stream, returns_works=name == NPU_LIKE)

    return replace(COLLECTIVES[name], lacking=lambda: None, make=make, free_bytes=lambda _: None)
