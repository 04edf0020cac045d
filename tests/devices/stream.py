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
    a captured sum is computed at each replay, not at the capture, and no work is enqueued for the watchdog:
        ProcessGroupNCCL::collective, ProcessGroupHCCL::collective, NCCL's ncclLaunchPrepare (`persistent`)
    `abort` ends the kernels at once, and returns when no graph contains sums of the group any more: NCCL's
        ncclCommAbort sets the flags, then commDestroySync waits for localPersistentRefs
    after it a graph's sums would use freed memory: NCCL's reclaimPlan, commFree
    the host waits for the device before a capture: torch.cuda.graph.__enter__, torch_npu's npu.graph.__enter__
    it cannot wait within its own capture, nor for an event that is recorded there: cudaStreamBeginCapture,
        cudaEventQuery

The time that a sum takes on the device passes within its launch here, so that the values behind it are right.
"""

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import AllreduceOptions
from torch.utils._python_dispatch import TorchDispatchMode

from devices.collectives import COLLECTIVES, Collective
from devices.interface import Traits
from devices.polling import wait_until
from tests.devices.capturing_device import Recorder
from tests.devices.fake_device import TRAITS, VISIBLE, CardDevice, FakeKind

_LIMIT_S = 60.0
_LATE_QUERIES = 3
NPU_LIKE = "hccl"


@dataclass
class Stream:
    """What happened on the stream, in order: "sum", "event", "replay", and "host waits".

    `join_s`: how long a sum takes at most. A sum that no peer joined in time hangs: nothing behind it is done until the
    group is aborted. `fault`: at the sum of this number, the process sends itself this signal. `error` is the device's;
    sums are `refused` with that reason. `num_sums` counts calls, captured ones too. `capture_fault`: the number of a
    capture that fails, the sums of its warm-up and its capture before that, and the device's words.
    `ahead`: set by the end of operations that share the stream's queue.
    """

    join_s: float = 30.0
    fault: tuple[int, int] | None = None
    log: list[str] = field(default_factory=list)
    error: str | None = None
    refused: str | None = None
    aborted: bool = False
    ahead: list[threading.Event] = field(default_factory=list)
    num_sums: int = 0
    num_captures: int = 0
    capture_fault: tuple[int, int, str] | None = None
    graphs: "weakref.WeakSet[StreamGraph]" = field(default_factory=weakref.WeakSet)
    _recording: "tuple[int, Recorder] | None" = None
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

    @property
    def recorder(self) -> Recorder | None:
        """The recorder of the capture by this thread, None outside of one."""
        if self._recording is None or self._recording[0] != threading.get_ident():
            return None
        return self._recording[1]

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Capture what this thread launches within the block."""
        recorder = Recorder()
        self._recording = threading.get_ident(), recorder
        try:
            with recorder:
                yield recorder
        finally:
            self._recording = None

    def sum(self) -> None:
        """Record a sum."""
        self.log.append("sum")
        if self.fault is not None and self.log.count("sum") == self.fault[0]:
            os.kill(os.getpid(), self.fault[1])

    def hang(self) -> None:
        self._hung = True

    def abort(self) -> None:
        self.aborted = True
        self._ended.set()
        assert wait_until(lambda: not self.graphs, _LIMIT_S), "the abort waits for graphs that stay"

    def wait(self) -> None:
        """Wait as the host does: forever if a sum hangs."""
        self.check()
        if self.is_hung:
            assert self._ended.wait(_LIMIT_S), "the host waits for a sum that never ends"

    def check(self) -> None:
        if self.recorder is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        if self.error is not None:
            raise RuntimeError(self.error)


STREAM = Stream()
"""The stream of this process's device."""


class StreamKind(FakeKind):
    """The fake device's kind with a stream; `traits` names the collective of its ranks. Each open is another device.

    Its attention fits graphs.
    """

    def __init__(self, collective: str = "nccl") -> None:
        super().__init__(
            replace(TRAITS, visible_variable=VISIBLE, is_asynchronous=True, collective=collective, attention="cuda")
        )
        self._numbers = itertools.count()

    def open(self, index: int = 0) -> "StreamDevice":
        return StreamDevice(next(self._numbers), self.traits, self.total_bytes)


@dataclass
class StreamDevice(CardDevice):
    """Implements Device."""

    traits: Traits = field(default_factory=lambda: StreamKind().traits)
    stream: Stream = field(default_factory=lambda: STREAM)
    captures_graphs: bool = True

    def event(self) -> "StreamEvent":  # type: ignore[override]
        return StreamEvent(self.stream)

    def synchronize(self) -> None:
        self.stream.log.append("host waits")
        self.stream.wait()

    def capture(self, run: Callable[[], None]) -> "StreamGraph":
        stream = self.stream
        stream.num_captures += 1
        before = stream.num_sums
        with _Failing(lambda: self._fail(before)):
            run()
            self.synchronize()
            with stream.recording() as recorder:
                run()
        recorder.overwrite()
        return StreamGraph(stream, recorder)

    def _fail(self, before: int) -> None:
        fault = self.stream.capture_fault
        if fault is not None and fault[0] == self.stream.num_captures and self.stream.num_sums - before == fault[1]:
            raise RuntimeError(fault[2])


class _Failing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `check` before each operation."""

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._check = check

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._check()
        return func(*args, **(kwargs or {}))


class StreamGraph:
    """Implements Graph."""

    def __init__(self, stream: Stream, recorder: Recorder) -> None:
        self._stream, self._recorder = stream, recorder
        stream.graphs.add(self)

    def replay(self, host_lengths: dict[str, list[int]] | None = None) -> None:
        assert not host_lengths, "no operation took them from the host"
        assert not self._stream.aborted, "the graph's sums use freed memory"
        self._stream.log.append("replay")
        self._recorder.replay()


class StreamEvent:
    """Implements Event: it is done some queries late, and never behind a sum that hangs."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._queries, self._is_behind = stream, 0, False
        self._ahead: list[threading.Event] = []

    def record(self) -> None:
        assert self._stream.recorder is None, "an event that is part of a graph shows nothing to the host"
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
        recorder = self._stream.recorder
        self._stream.num_sums += 1
        if recorder is None:
            self._stream.sum()
        if self._stream.refused is not None:
            raise RuntimeError(self._stream.refused)
        if self._stream.aborted:
            raise RuntimeError("NCCL communicator was aborted on rank 0.")
        summed = tensor.clone() if self._returns_works else tensor
        if recorder is None:
            self._sum(summed)
        else:
            recorder.record(self._replay, summed)
        if not self._returns_works:
            return None
        tensor.fill_(1 if tensor.dtype == torch.int32 else float("nan"))
        return StreamWork(tensor, summed, self._stream)

    def abort(self) -> None:
        self._stream.abort()

    def _replay(self, tensor: torch.Tensor) -> None:
        self._stream.sum()
        self._sum(tensor)

    def _sum(self, tensor: torch.Tensor) -> None:
        if self._stream.is_hung:
            return
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
