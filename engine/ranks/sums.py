"""Sum a tensor over the ranks, which are processes of one host: in shared memory, or by a process group.

shared | the native sum (native/ranks.c), where every rank has it and runs on the CPU
group  | torch's process group on the CPU (devices/collectives.py), on loopback
stream | torch's process group of the ranks' device: enqueued, and the host continues (stream_sum.py)
"""

import os
import re
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import AllreduceOptions, FileStore

from devices.collectives import Collective, collective_of
from engine.ranks.marks import SLOT_BYTES, Marks
from native.ranks import RanksLibrary, SumOutcome
from wire.errors import ConfigError
from wire.kv_layout import Rank

_LOOPBACK = "127.0.0.1"
_MAX_REASON = 200


class ReduceFailed(Exception):
    """A sum over the ranks failed: one of the ranks has ended or is stuck."""


def collective_for_ranks(device: str) -> Collective:
    """Return the collective for ranks on `device`, such as "cpu" or "npu:0". Raises ConfigError if unavailable."""
    collective = collective_of(device)
    if collective is None:
        raise ConfigError(f"ranks cannot run on {device}: it has no process groups")
    lacking = collective.lacking()
    if lacking is not None:
        raise ConfigError(
            f"ranks on {device} all-reduce over {collective.name}, but {lacking}: use --tensor-parallel-size 1"
        )
    return collective


class SharedSum:
    """One rank's side of the sums in shared memory."""

    def __init__(self, library: RanksLibrary, rank: Rank, marks: Marks, step_s: float) -> None:
        self._library, self._rank, self._marks, self._step_s = library, rank, marks, step_s

    def __call__(self, tensor: torch.Tensor) -> None:
        """Sum a contiguous tensor in place, in float32, with the same bits on all ranks. Raises ReduceFailed."""
        wide = tensor if tensor.dtype == torch.float32 else tensor.float()
        outcome = self._library.sum(
            self._marks.address, self._rank.number, self._rank.of, SLOT_BYTES, wide.data_ptr(), wide.numel(),
            self._step_s,
        )  # fmt: skip
        if outcome == SumOutcome.LATE:
            raise ReduceFailed(f"no sum over the ranks within {self._step_s:g} s")
        if outcome == SumOutcome.ABORTED:
            raise ReduceFailed("another rank is lost")
        if wide is not tensor:
            tensor.copy_(wide)


class GroupSum:
    """One rank's side of a process group on the CPU."""

    def __init__(self, group: Any, rank: Rank, marks: Marks, step_s: float) -> None:
        """`group` is from `join_group`."""
        self._group, self._rank, self._marks, self._step_s = group, rank, marks, step_s

    def __call__(self, tensor: torch.Tensor) -> None:
        """Sum a contiguous tensor in place. Raises ReduceFailed."""
        self._marks.advance(self._rank.number)
        options = AllreduceOptions()
        options.timeout = timedelta(seconds=self._step_s)
        try:
            self._group.allreduce([tensor], options).wait()
        except RuntimeError as error:
            raise ReduceFailed(in_one_line(error)) from error


def join_group(collective: Collective, store_fd: int, rank: Rank, device: str = "cpu") -> Any:
    """Return a process group with the other ranks, which all do the same, each on its `device`. Raises ReduceFailed."""
    # The store's destructor, at an unknown time, opens the file by this name again and ends the process if it is
    # another file: so this descriptor is never closed. A rank has only one group.
    kept_fd, connect_s = os.dup(store_fd), collective.connect_s(os.environ)
    try:
        store = FileStore(f"/proc/self/fd/{kept_fd}", rank.of)
        store.set_timeout(timedelta(seconds=connect_s))
        return collective.make(store, rank.number, rank.of, _LOOPBACK, connect_s, device)
    except RuntimeError as error:
        raise not_found(rank, collective, in_one_line(error)) from error


def not_found(rank: Rank, collective: Collective, reason: str) -> ReduceFailed:
    """Return the error of a rank that cannot connect to the others."""
    return ReduceFailed(f"{rank} found no other ranks over {collective.name}: {reason}")


def in_one_line(error: Exception) -> str:
    """Return a message of torch's process groups, without its source locations."""
    text = (str(error) or type(error).__name__).splitlines()[0]
    return re.sub(r"\[[^]]*\.(cc|cpp|h):\d+\] ?", "", text)[:_MAX_REASON]
