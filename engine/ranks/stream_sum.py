"""Sums over ranks on devices: enqueued on the device's stream, and the host continues.

launch    ... kernels -> sum -> kernels -> sum -> ... -> event        (nothing waits)
replay    a graph that contains all sums of a step -> event            (nothing waits)
wait      until the event is done, another rank is lost, or the limit has passed

nccl   a sum runs on the current stream itself, and there is no work to wait for (ProcessGroupNCCL::collective)
hccl   a sum runs on another stream; the wait of its work makes the current one wait (WorkHCCL::synchronizeInternal)

A sum that another rank does not join never ends by itself, and all work after it waits: `fail` aborts it. NCCL ends
the sums at once, but its abort returns only when no graph contains any (init.cc: ncclCommAbort, commDestroySync).
"""

import contextlib
import os
import threading

import torch
from torch._C._distributed_c10d import AllreduceOptions

from devices.collectives import Collective
from devices.interface import Device, Event
from devices.polling import wait_until
from engine.ranks.marks import Marks
from engine.ranks.sums import ReduceFailed, in_one_line, join_group, not_found
from wire.kv_layout import Rank

_ABORT_S = 1.0
"""Time in which an abort ends the sums, whether its call has returned or not."""


class StreamSum:
    """One rank's side of a process group on its device. One thread sums and waits; any thread may call `fail`."""

    def __init__(
        self, collective: Collective, store_fd: int, rank: Rank, marks: Marks, step_s: float, device: Device
    ) -> None:
        """Connect to the other ranks, which all do the same. Raises ReduceFailed. `step_s` limits a step's sums."""
        self._collective, self._rank, self._marks, self.device = collective, rank, marks, device
        self._failed: str | None = None
        self._failing = threading.Lock()
        self._options = AllreduceOptions()  # with the group's own timeout: torch would make a hung sum look done
        self._options.asyncOp = False
        self.step_s = step_s
        self._group = join_group(collective, store_fd, rank, str(device.torch_device))
        if collective.lazy:
            self._connect(collective.connect_s(os.environ))

    def __call__(self, tensor: torch.Tensor) -> None:
        """Enqueue the sum of a contiguous tensor, in place. Raises ReduceFailed."""
        self.expect(1)
        try:
            self._enqueue(tensor)
        except RuntimeError as error:
            raise self.fail(in_one_line(error)) from error

    def expect(self, num_sums: int) -> None:
        """Count sums that are enqueued next. Raises ReduceFailed: after an abort a graph's sums use freed memory."""
        if self._failed is not None:
            raise ReduceFailed(self._failed)
        self._marks.advance(self._rank.number, num_sums)

    @property
    def is_aborted(self) -> bool:
        """Whether a rank is lost."""
        return self._marks.is_aborted

    def mark(self) -> Event:
        """Return an event after all sums so far."""
        event = self.device.event()
        event.record()
        return event

    def wait(self, done: Event, timeout_s: float | None = None) -> None:
        """Wait until an event of `mark` is done, by default for `step_s`.

        Raises ReduceFailed, or the RuntimeError of this rank's own device; the sums are then aborted.
        """
        limit_s = self.step_s if timeout_s is None else timeout_s
        try:
            ended = wait_until(lambda: self._failed is not None or self.is_aborted or done.is_done, limit_s)
        except RuntimeError as error:
            self.fail(in_one_line(error))
            raise
        if self._failed is not None or self.is_aborted:
            raise self.fail("another rank is lost")
        if not ended:
            raise self.fail(f"no sum over the ranks within {limit_s:g} s")

    def fail(self, reason: str) -> ReduceFailed:
        """Abort the sums that the device waits for, fail all later ones, and return the error. The first reason stays.

        Without the abort a wait for the device would never end. HCCL has no abort: there, only the end of the process
        ends the wait.
        """
        with self._failing:
            if self._failed is None:
                self._failed = reason
                aborting = threading.Thread(target=self._abort, name="rank-abort", daemon=True)
                aborting.start()
                aborting.join(_ABORT_S)
            return ReduceFailed(self._failed)

    def _abort(self) -> None:
        if self._collective.abort is not None:
            with contextlib.suppress(RuntimeError):
                self._collective.abort(self._group, 0)

    def _enqueue(self, tensor: torch.Tensor) -> None:
        work = self._group.allreduce([tensor], self._options)
        if work is not None:
            work.wait()  # the stream waits; with a timeout the host would

    def _connect(self, timeout_s: float) -> None:
        """Sum once, which makes the communicator, so that this time counts for no step."""
        try:
            self._enqueue(torch.zeros(1, device=self.device.torch_device))
        except RuntimeError as error:
            raise not_found(self._rank, self._collective, in_one_line(error)) from error
        self.wait(self.mark(), timeout_s)
