"""The sum over all ranks within a step: gloo between the processes of one host, on loopback alone.

The processes find each other through a memfd that all hold open: no port to rendezvous at and no file to leave behind.
"""

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import AllreduceOptions, FileStore
from torch.distributed import ProcessGroupGloo

from engine.ranks.marks import Marks
from wire.kv_layout import Rank

_LOOPBACK = "127.0.0.1"
_MAX_REASON = 200
_MEET_S = 60.0  # every rank has loaded by then, and only has to be scheduled


class ReduceFailed(Exception):
    """A sum over the ranks did not come about: one of them is gone or stuck."""


class Reduce:
    """One rank's end. Owner of its group and of the count of this step's sums; one thread calls it.

    Before `connect` nothing is summed: the probe that looks at shapes runs on each rank alone.
    """

    def __init__(self, rank: Rank, step_s: float) -> None:
        self._rank = rank
        self._options = AllreduceOptions()
        self._options.timeout = timedelta(seconds=step_s)
        self._group: Any = None
        self._marks: Marks | None = None
        self._after: Callable[[], None] | None = None
        self.num_sums = 0

    def connect(self, store_fd: int, marks: Marks) -> None:
        """Meet the other ranks, all of which do the same. Raises ReduceFailed."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=_LOOPBACK, lazy_init=False)]
        options._timeout = timedelta(seconds=_MEET_S)
        options._threads = 1
        try:
            store = FileStore(f"/proc/self/fd/{store_fd}", self._rank.of)
            store.set_timeout(timedelta(seconds=_MEET_S))
            self._group = ProcessGroupGloo(store, self._rank.number, self._rank.of, options)
        except RuntimeError as error:
            raise ReduceFailed(f"{self._rank} did not meet the others: {_in_one_line(error)}") from error
        self._marks = marks

    def begin(self, after: Callable[[], None] | None = None) -> None:
        """Start a step; `after` is called after each of its sums."""
        self.num_sums, self._after = 0, after

    def __call__(self, tensor: torch.Tensor) -> None:
        """Add up `tensor` over all ranks, in place. Raises ReduceFailed when that takes too long."""
        if self._group is None or self._marks is None:
            return
        self._marks.advance(self._rank.number)
        flat = tensor if tensor.is_contiguous() else tensor.contiguous()
        try:
            self._group.allreduce([flat], self._options).wait()
        except RuntimeError as error:
            raise ReduceFailed(_in_one_line(error)) from error
        if flat is not tensor:
            tensor.copy_(flat)
        self.num_sums += 1
        if self._after is not None:
            self._after()

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self._group = None


def _in_one_line(error: Exception) -> str:
    """Return what gloo says, without the places in its sources."""
    text = (str(error) or type(error).__name__).splitlines()[0]
    return re.sub(r"\[[^]]*\.(cc|cpp|h):\d+\] ?", "", text)[:_MAX_REASON]
