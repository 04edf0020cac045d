"""Sum a tensor over the ranks, which are processes of one host: in shared memory, or by a process group.

shared | the native sum (native/ranks.c), where every rank has it and runs on the CPU
group  | torch's process group for the ranks' device (devices/collectives.py), on loopback
"""

import contextlib
import os
import re
import time
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
_FIRST_POLL_S, _LAST_POLL_S = 0.00005, 0.002


class ReduceFailed(Exception):
    """A sum over the ranks failed: one of them has ended or is stuck."""


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
    """One rank's side of a process group."""

    def __init__(
        self, collective: Collective, store_fd: int, rank: Rank, marks: Marks, step_s: float, device: str = "cpu"
    ) -> None:
        """Connect to the other ranks, which all do the same, each on its `device`. Raises ReduceFailed."""
        self._collective, self._rank, self._marks, self._step_s = collective, rank, marks, step_s
        # The store's destructor, at an unknown time, opens the file by this name again and ends the process if it is
        # another file: so this descriptor is never closed. A rank has only one group.
        kept_fd, meet_s = os.dup(store_fd), collective.meet_s(os.environ)
        try:
            store = FileStore(f"/proc/self/fd/{kept_fd}", rank.of)
            store.set_timeout(timedelta(seconds=meet_s))
            self._group: Any = collective.make(store, rank.number, rank.of, _LOOPBACK, meet_s, device)
            if collective.lazy:
                self._add_up(torch.zeros(1, device=device), meet_s)
        except RuntimeError as error:
            raise ReduceFailed(f"{rank} found no other ranks by {collective.name}: {_in_one_line(error)}") from error

    def __call__(self, tensor: torch.Tensor) -> None:
        """Sum a contiguous tensor in place. Raises ReduceFailed."""
        self._marks.advance(self._rank.number)
        try:
            self._add_up(tensor, self._step_s)
        except RuntimeError as error:
            self._give_up()
            raise ReduceFailed(_in_one_line(error)) from error
        except ReduceFailed:
            self._give_up()
            raise

    def _add_up(self, tensor: torch.Tensor, timeout_s: float) -> None:
        options = AllreduceOptions()
        options.timeout = timedelta(seconds=timeout_s)
        work = self._group.allreduce([tensor], options)
        if not self._collective.polls:
            work.wait()
            return
        self._poll(work, timeout_s)
        work.wait(options.timeout)  # without a timeout, NCCL's wait reports no failure

    def _give_up(self) -> None:
        """Abort the collective on the device: else a wait for the device would never end."""
        if self._collective.polls and self._collective.abort is not None:
            with contextlib.suppress(RuntimeError):
                self._collective.abort(self._group, 0)

    def _poll(self, work: Any, timeout_s: float) -> None:
        """Wait, with a timeout, until the device is done: another rank may never join the sum."""
        deadline, pause = time.monotonic() + timeout_s, _FIRST_POLL_S
        while not work.is_completed():
            if self._marks.is_aborted:
                raise ReduceFailed("another rank is lost")
            if time.monotonic() > deadline:
                raise ReduceFailed(f"no sum over the ranks within {timeout_s:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LAST_POLL_S)


def _in_one_line(error: Exception) -> str:
    """Return gloo's message, without its source locations."""
    text = (str(error) or type(error).__name__).splitlines()[0]
    return re.sub(r"\[[^]]*\.(cc|cpp|h):\d+\] ?", "", text)[:_MAX_REASON]
