"""A separate device kind in one file: CPU tensors, a pool like a device's, events that are counted.

A new kind has to implement what is here; the rest of the product uses it through devices/interface.py.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch

from devices.device_pool import DevicePool
from devices.interface import DeviceBytes, Graph, Traits
from devices.shared_memory import SharedMemory, map_host_memory, share_host_memory
from tests.devices.held_bytes import HeldByOperations
from wire.errors import ConfigError
from wire.kv_layout import PoolLayout

TRAITS = Traits(
    kind="fake", visible_variable=None, collective="gloo", block_size=32, prefill_chunk_size=64,
    pool_alignment=2 << 20, attention="fake",
)  # fmt: skip
VISIBLE = "FAKE_VISIBLE_DEVICES"


@dataclass
class FakeKind:
    """Implements DeviceKind. `why` is returned by `lacking`; `shown`: whether its card is visible."""

    traits: Traits = TRAITS
    why: str | None = None
    total_bytes: int = 1 << 30
    shown: bool = True

    def sees_card(self) -> bool:
        return self.shown

    def lacking(self) -> str | None:
        return self.why

    def open(self, index: int = 0) -> "FakeDevice":
        return FakeDevice(index, self.traits, self.total_bytes)


@dataclass
class FakeDevice:
    """Implements Device: computes synchronously, like the CPU, and has pools in its own memory, as cards have."""

    index: int = 0
    traits: Traits = TRAITS
    total_bytes: int = 1 << 30
    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    captures_graphs: bool = False
    checks_in_child: bool = False
    recorded: int = 0
    waited: int = 0

    @property
    def name(self) -> str:
        return f"{self.traits.kind}:{self.index}"

    def describe(self) -> str:
        return f"{self.name}: tensors of the CPU"

    def memory(self) -> DeviceBytes:
        return DeviceBytes(total=self.total_bytes, free=self.total_bytes)

    def peak_bytes(self, run: Callable[[], None]) -> int:
        counting = HeldByOperations()
        with counting:
            run()
        return counting.held.peak

    def make_pool(self, layout: PoolLayout) -> DevicePool:
        if layout.total_bytes > self.total_bytes:
            raise ConfigError(f"no KV pool of {layout.total_bytes} bytes on {self.name}, which has {self.total_bytes}")
        return DevicePool(layout, self)

    def share_memory(self, num_bytes: int) -> SharedMemory:
        return share_host_memory(num_bytes)

    def map_shared(self, handle: str, fds: tuple[int, ...], num_bytes: int) -> torch.Tensor:
        return map_host_memory(fds[0], num_bytes)

    def activate(self) -> None:
        pass

    def event(self) -> "FakeEvent":
        return FakeEvent(self)

    def new_stream(self) -> Callable[[], AbstractContextManager[object]]:
        return nullcontext

    def synchronize(self) -> None:
        pass

    def capture(self, run: Callable[[], None]) -> Graph:
        raise RuntimeError(f"{self.traits.kind} does not support graph capture")


class FakeEvent:
    """Implements Event."""

    is_done = True

    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def record(self) -> None:
        self._device.recorded += 1

    def wait(self) -> None:
        self._device.waited += 1

    def synchronize(self) -> None:
        pass


class CardKind(FakeKind):
    """The same with steps that are collected later, and devices that name the card visible to their process.

    Their quantised layers and experts stay so by the CPU's kernels.
    """

    def __init__(self) -> None:
        kept = ("int4pack-host", "int8", "experts-widened")
        super().__init__(replace(TRAITS, visible_variable=VISIBLE, is_asynchronous=True, kept_linears=kept))

    def open(self, index: int = 0) -> "FakeDevice":
        return CardDevice(index, self.traits, self.total_bytes)


class CardDevice(FakeDevice):
    def describe(self) -> str:
        return f"{self.name}: card {os.environ.get(VISIBLE, 'of any number')}"
