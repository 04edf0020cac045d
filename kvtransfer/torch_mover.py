"""Moves and digests bytes of device memory with torch, in pieces of 4 MiB. Needs torch; CPU tensors do as well.

    source runs --gather--> staging on its device --> pinned host memory --> xxh3-64       (with digests)
                            staging on its device --scatter--> target runs                 (the same bytes)

What it costs: a piece is gathered and scattered by one kernel each where its rows are alike (row_plan.py), at the
device's own memory speed, which is little. The digest stays xxh3-64, so that a frame's digest is the same whatever
memory it comes from; for it every byte crosses to the host once on each side, over PCIe, and is hashed by one CPU
thread. So a link between devices with digests is as fast as that crossing, and one without them as the devices are.

A move has ended when it returns: the only waits are for events of its own stream, never for the whole device. What its
source has to be waited for is waited for first, `ready_s` at most, with nothing launched; from then on the move waits
for its own kernels alone, as long as they take: whoever was told that it ended may give the target's bytes away.
"""

import contextlib
import ctypes
import functools
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import xxhash

from devices.polling import wait_until
from kvtransfer.device_memory import DeviceRegion
from kvtransfer.digest import Region, RegionRuns, Runs, StopFlag
from kvtransfer.row_plan import RowPlan, plan_rows
from kvtransfer.stream import LinkLost
from kvtransfer.transport import Timeouts
from native.memory import check_move, check_place

PIECE_BYTES = 4 << 20
_ALIGNMENT = 4096
_PLANS = 64


class TorchMover:
    """Implements digest.Mover over DeviceRegions, and between these and Regions. Thread-safe.

    `stop` is looked at before every piece of `piece_bytes`. The uses of one pool at once are as many as its moves.
    """

    name = "torch"

    def __init__(self, piece_bytes: int = PIECE_BYTES, ready_s: float = Timeouts().progress_s) -> None:
        self._piece_bytes, self._ready_s = piece_bytes, ready_s
        self._plans = functools.lru_cache(maxsize=_PLANS)(self._make_plans)
        self._idle: dict[torch.device, list[_Workspace]] = {}
        self._lock = threading.Lock()

    def digest(self, place: RegionRuns) -> int:
        """See Mover."""
        check_place(place)
        hasher, memory = xxhash.xxh3_64(), _tensor_of(place.region)
        with self._lend(memory.device) as space, space.current():
            self._await_ready(place.region, space)
            for plan in self._plans_of(place, memory):
                plan.gather(memory, place.base, space.stage)
                hasher.update(space.on_host(plan.num_bytes))
        return int(hasher.intdigest())

    def copy(self, source: RegionRuns, target: RegionRuns, stop: StopFlag) -> bool:
        """See Mover."""
        return self._move(source, target, stop, None)

    def copy_and_digest(self, source: RegionRuns, target: RegionRuns, stop: StopFlag) -> int | None:
        """See Mover. What is digested is the very copy that is then written, whatever the source does meanwhile."""
        hasher = xxhash.xxh3_64()
        return int(hasher.intdigest()) if self._move(source, target, stop, hasher) else None

    def _move(self, source: RegionRuns, target: RegionRuns, stop: StopFlag, hasher: Any) -> bool:
        check_move(source, target)
        read, written = _tensor_of(source.region), _tensor_of(target.region)
        plans = zip(self._plans_of(source, read), self._plans_of(target, written), strict=True)
        with contextlib.ExitStack() as lent:
            here = lent.enter_context(self._lend(read.device))
            there = here if written.device == read.device else lent.enter_context(self._lend(written.device))
            with here.current():
                self._await_ready(source.region, here)
            for reading, writing in plans:
                if stop.is_set():
                    break
                with here.current():
                    reading.gather(read, source.base, here.stage)
                    if hasher is not None:
                        hasher.update(here.on_host(reading.num_bytes))
                    elif there is not here:
                        here.wait()
                with there.current():
                    if there is not here:
                        there.stage[: reading.num_bytes].copy_(here.stage[: reading.num_bytes])
                    writing.scatter(there.stage, written, target.base)
            there.wait()
        return not stop.is_set()

    def _plans_of(self, place: RegionRuns, memory: torch.Tensor) -> "tuple[RowPlan, ...]":
        start = memory.storage_offset()
        align = math.gcd(place.base, memory.data_ptr(), start, _ALIGNMENT)
        return self._plans(place.runs, align, memory.device)

    def _make_plans(self, runs: Runs, align: int, device: torch.device) -> "tuple[RowPlan, ...]":
        """Return how the runs are moved, piece by piece: made once for all tensors of a pool that they serve."""
        with self._lend(device) as space, space.current():
            plans = tuple(plan_rows(runs, align, self._piece_bytes, device))
            space.wait()  # other streams use what was put on the device
        return plans

    def _await_ready(self, region: Region, space: "_Workspace") -> None:
        """Wait until the region may be read; the current stream is the workspace's. Raises LinkLost."""
        if isinstance(region, DeviceRegion) and region.ready is not None:
            region.ready()
            if not space.wait_at_most(self._ready_s):
                device = region.tensor.device
                raise LinkLost(f"KV on {device} was not ready to be read within {self._ready_s:g} s")

    @contextmanager
    def _lend(self, device: torch.device) -> "Iterator[_Workspace]":
        with self._lock:
            idle = self._idle.setdefault(device, [])
            space = idle.pop() if idle else None
        space = space or _Workspace(device, self._piece_bytes)
        try:
            yield space
        finally:
            if not space.is_held_up:  # else its stream is never used again, nor waited for
                space.wait()  # after an error, too, nothing of ours may be under way when the next one takes it
                with self._lock:
                    idle.append(space)


class _Workspace:
    """Staging memory for one move at a time on one device, its pinned twin, and a stream of its own."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        on_host = device.type == "cpu"
        pinned = torch.accelerator.is_available()
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)  # [num_bytes]
        self.stage = host if on_host else torch.empty(num_bytes, dtype=torch.uint8, device=device)  # [num_bytes]
        self._host, self._bytes = host, _bytes_at(host.data_ptr(), num_bytes)
        self._module: Any = torch.get_device_module(device)
        self._stream: Any = None if on_host else self._module.Stream(device=device)
        self._event: Any = None if on_host else self._module.Event(blocking=True)
        self.is_held_up = False
        """Whether its stream waits for something that did not come in time."""

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Make this stream torch's current one."""
        return contextlib.nullcontext() if self._stream is None else self._module.stream(self._stream)

    def wait(self) -> None:
        """Wait for all that was begun on this stream."""
        if self._event is not None:
            self._event.record(self._stream)
            self._event.synchronize()

    def wait_at_most(self, timeout_s: float) -> bool:
        """Wait so long for all that was begun on this stream; return whether it ended."""
        if self._event is not None:
            self._event.record(self._stream)
            self.is_held_up = not wait_until(self._event.query, timeout_s)
        return not self.is_held_up

    def on_host(self, num_bytes: int) -> memoryview:
        """Return the first bytes of the staging memory on the host, until they are asked for again."""
        if self._stream is not None:
            self._host[:num_bytes].copy_(self.stage[:num_bytes], non_blocking=True)
            self.wait()
        return self._bytes[:num_bytes]


def _tensor_of(region: Region) -> torch.Tensor:
    if isinstance(region, DeviceRegion):
        return region.tensor
    if region.num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(_bytes_at(region.address, region.num_bytes), dtype=torch.uint8)  # [num_bytes]


def _bytes_at(address: int, num_bytes: int) -> memoryview:
    """Return memory by its address, also what is only readable (torch warns of that); whoever asks keeps it alive."""
    return memoryview((ctypes.c_uint8 * num_bytes).from_address(address)).cast("B")
