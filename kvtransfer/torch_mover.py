"""Moves and digests bytes of device memory with torch, in pieces of 4 MiB. Needs torch; supports CPU tensors too.

    source runs --gather--> staging on its device --> pinned host memory --> xxh3-64       (with digests)
                            staging on its device --scatter--> target runs                 (the same bytes)

Cost: a piece is gathered and scattered by one kernel each if its rows are regular (row_plan.py), at the speed of the
device's memory, so in little time. The digest is xxh3-64 here too, so that a frame's digest does not depend on the
memory from which the frame is read. For the digest, every byte is copied to the host once on each side, over PCIe, and
hashed by one CPU thread. So with digests a link between devices is as fast as that copy, and without them as fast as
the devices.

A move has completed when it returns: it waits for events of its own stream only, never for the whole device. It first
waits, for at most `ready_s` and with nothing launched, until its source is ready. After that it waits only for its own
kernels, however long they take, so that the caller may free the target's bytes once the move has returned.
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
from kvtransfer.transport_interface import Timeouts
from native.memory import check_move, check_place

PIECE_BYTES = 4 << 20
_ALIGNMENT = 4096
_PLANS = 64


class TorchMover:
    """Implements digest.Mover over DeviceRegions, and between these and Regions. Thread-safe.

    `stop` is checked before every piece of `piece_bytes`. Several moves may use the same pool at the same time.
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
        with self._workspace(memory.device) as space, space.current():
            self._wait_until_ready(place.region, space)
            for plan in self._plans_of(place, memory):
                plan.gather(memory, place.base, space.stage)
                hasher.update(space.on_host(plan.num_bytes))
        return int(hasher.intdigest())

    def copy(self, source: RegionRuns, target: RegionRuns, stop: StopFlag) -> bool:
        """See Mover."""
        return self._move(source, target, stop, None)

    def copy_and_digest(self, source: RegionRuns, target: RegionRuns, stop: StopFlag) -> int | None:
        """See Mover. The digest is that of the copy that is then written, even if the source changes meanwhile."""
        hasher = xxhash.xxh3_64()
        return int(hasher.intdigest()) if self._move(source, target, stop, hasher) else None

    def _move(self, source: RegionRuns, target: RegionRuns, stop: StopFlag, hasher: Any) -> bool:
        check_move(source, target)
        read, written = _tensor_of(source.region), _tensor_of(target.region)
        plans = zip(self._plans_of(source, read), self._plans_of(target, written), strict=True)
        with contextlib.ExitStack() as stack:
            here = stack.enter_context(self._workspace(read.device))
            there = here if written.device == read.device else stack.enter_context(self._workspace(written.device))
            with here.current():
                self._wait_until_ready(source.region, here)
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
        """Return the plans of the runs, piece by piece: made once for all tensors of a pool with these runs."""
        with self._workspace(device) as space, space.current():
            plans = tuple(plan_rows(runs, align, self._piece_bytes, device))
            space.wait()  # other streams will use the tensors of these plans
        return plans

    def _wait_until_ready(self, region: Region, space: "_Workspace") -> None:
        """Wait until the region may be read, on the current stream, which is the workspace's. Raises LinkLost."""
        if isinstance(region, DeviceRegion) and region.ready is not None:
            region.ready()
            if not space.wait_at_most(self._ready_s):
                device = region.tensor.device
                raise LinkLost(f"KV on {device} was not ready to be read within {self._ready_s:g} s")

    @contextmanager
    def _workspace(self, device: torch.device) -> "Iterator[_Workspace]":
        with self._lock:
            idle = self._idle.setdefault(device, [])
            space = idle.pop() if idle else None
        space = space or _Workspace(device, self._piece_bytes)
        try:
            yield space
        finally:
            if not space.is_held_up:  # else its stream is abandoned
                space.wait()  # after an error too: it must be idle for the next move
                with self._lock:
                    idle.append(space)


class _Workspace:
    """Staging memory for one move at a time on one device, pinned host memory of the same size, and its own stream."""

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
        """Whether an event that its stream waits for was not reached in time."""

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Make this stream torch's current one."""
        return contextlib.nullcontext() if self._stream is None else self._module.stream(self._stream)

    def wait(self) -> None:
        """Wait for all work queued on this stream."""
        if self._event is not None:
            self._event.record(self._stream)
            self._event.synchronize()

    def wait_at_most(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for all work queued on this stream; return whether it completed."""
        if self._event is not None:
            self._event.record(self._stream)
            self.is_held_up = not wait_until(self._event.query, timeout_s)
        return not self.is_held_up

    def on_host(self, num_bytes: int) -> memoryview:
        """Return the first bytes of the staging memory on the host, valid until the next call."""
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
    """Return memory by its address, also read-only memory (torch warns of that); the caller must keep it alive."""
    return memoryview((ctypes.c_uint8 * num_bytes).from_address(address)).cast("B")
