"""How a tensor is added up over the ranks, which are processes of one host: in memory they share, or by gloo.

shared | the native sum (native/ranks.c), where every rank has it
gloo   | on loopback; the processes find each other through a memfd: no port to meet at, no file to leave behind
"""

import re
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import AllreduceOptions, FileStore
from torch.distributed import ProcessGroupGloo

from engine.ranks.marks import SLOT_BYTES, Marks
from native.ranks import Outcome, RanksLibrary
from wire.kv_layout import Rank

_LOOPBACK = "127.0.0.1"
_MAX_REASON = 200
_MEET_S = 60.0  # every rank has loaded by then, and only has to be scheduled


class ReduceFailed(Exception):
    """A sum over the ranks did not come about: one of them is gone or stuck."""


class SharedSum:
    """One rank's end of the sums in shared memory."""

    def __init__(self, library: RanksLibrary, rank: Rank, marks: Marks, step_s: float) -> None:
        self._library, self._rank, self._marks, self._step_s = library, rank, marks, step_s

    def __call__(self, tensor: torch.Tensor) -> None:
        """Add up a tensor that is contiguous, in place: in float32, the same bits on all ranks. Raises ReduceFailed."""
        wide = tensor if tensor.dtype == torch.float32 else tensor.float()
        outcome = self._library.sum(
            self._marks.address, self._rank.number, self._rank.of, SLOT_BYTES, wide.data_ptr(), wide.numel(),
            self._step_s,
        )  # fmt: skip
        if outcome == Outcome.LATE:
            raise ReduceFailed(f"no sum over the ranks within {self._step_s:g} s")
        if outcome == Outcome.ABORTED:
            raise ReduceFailed("another rank is lost")
        if wide is not tensor:
            tensor.copy_(wide)


class GlooSum:
    """One rank's end of a gloo group."""

    def __init__(self, store_fd: int, rank: Rank, marks: Marks, step_s: float) -> None:
        """Meet the other ranks, all of which do the same. Raises ReduceFailed."""
        self._rank, self._marks = rank, marks
        self._options = AllreduceOptions()
        self._options.timeout = timedelta(seconds=step_s)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=_LOOPBACK, lazy_init=False)]
        options._timeout = timedelta(seconds=_MEET_S)
        options._threads = 1
        try:
            store = FileStore(f"/proc/self/fd/{store_fd}", rank.of)
            store.set_timeout(timedelta(seconds=_MEET_S))
            self._group: Any = ProcessGroupGloo(store, rank.number, rank.of, options)
        except RuntimeError as error:
            raise ReduceFailed(f"{rank} did not meet the others: {_in_one_line(error)}") from error

    def __call__(self, tensor: torch.Tensor) -> None:
        """Add up a tensor that is contiguous, in place. Raises ReduceFailed."""
        self._marks.advance(self._rank.number)
        try:
            self._group.allreduce([tensor], self._options).wait()
        except RuntimeError as error:
            raise ReduceFailed(_in_one_line(error)) from error


def _in_one_line(error: Exception) -> str:
    """Return what gloo says, without the places in its sources."""
    text = (str(error) or type(error).__name__).splitlines()[0]
    return re.sub(r"\[[^]]*\.(cc|cpp|h):\d+\] ?", "", text)[:_MAX_REASON]
