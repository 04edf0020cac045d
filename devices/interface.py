"""The seam between the product and the devices that it computes on. Imports no torch.

    table.py   kinds by name; `choose` settles --device
    cpu.py  cuda.py  npu.py   one file a kind: its Traits, why it cannot be used, what opens one of its devices
    torch_device.py           what the accelerators that torch knows have in common

A kind is looked up by name, asked why it is lacking, and opened; what is opened is a Device. Adding a kind is one file
and one page of docs (docs/devices.md).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from wire.kv_layout import PoolLayout

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Traits:
    """What holds for all devices of one kind.

    `kind` is the word of --device and of device names, as in "npu:0". `visible_variable` shows a process its cards.
    `collective` is the name of its process groups in torch. `block_size` and `prefill_chunk_size` (tokens) are the
    defaults of these flags. A pool's base address is a multiple of `pool_alignment` bytes. `attention` names its own
    attention backend. `pools_on_host`: its pools are host memory, which peers may map and native kernels read.
    `kept_linears` names the ways in which its linear layers can stay quantised, the best first
    (engine/quantization/kept_table.py).
    `is_asynchronous`: what is launched is computed later, so a step may be launched before the last one is collected.
    `one_sided` is how Mooncake's engine reads its memory (kvtransfer/mooncake_engine.py).
    """

    kind: str
    visible_variable: str | None
    collective: str
    block_size: int
    prefill_chunk_size: int
    pool_alignment: int
    attention: str
    pools_on_host: bool = False
    kept_linears: tuple[str, ...] = ()
    is_asynchronous: bool = False
    one_sided: str = "tcp"


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """A device's memory now, in bytes."""

    total: int
    free: int


class Memory(Protocol):
    """A KV pool: host memory has `buffer` and may have `fd`; a device's has `tensor` (kvtransfer/device_memory.py)."""

    layout: PoolLayout

    @property
    def fd(self) -> int | None:
        """The sealed memfd that is the whole pool, or None."""
        ...

    @property
    def buffer(self) -> memoryview:
        """The whole pool as writable bytes. Raises TypeError where it lies on a device."""
        ...

    def close(self) -> None:
        """Give it back. Idempotent."""
        ...


class Event(Protocol):
    """A mark in a stream of work. On a device that computes at once every call is a no-op and `is_done` is true."""

    def record(self) -> None:
        """Mark what was launched on this thread's current stream so far."""
        ...

    def wait(self) -> None:
        """Make this thread's current stream wait for the mark; does not block the thread."""
        ...

    def synchronize(self) -> None:
        """Block this thread until the mark is reached."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether the mark is reached."""
        ...


class Graph(Protocol):
    """A captured sequence of launches over fixed memory."""

    def replay(self, host_lengths: "dict[str, list[int]] | None" = None) -> None:
        """Launch it again. `host_lengths` are new values of the lists that ops took from the host, by keyword."""
        ...


class Device(Protocol):
    """One open device. Owner of nothing but its handle; any thread, after `activate` there."""

    traits: Traits

    @property
    def name(self) -> str:
        """Its kind and index, as "cuda:0"; "cpu" has none."""
        ...

    @property
    def torch_device(self) -> "torch.device":
        """Where its tensors lie."""
        ...

    def describe(self) -> str:
        """Return one line for people: the card, its memory, and the versions below it."""
        ...

    def memory(self) -> DeviceBytes:
        """Return the figures of now."""
        ...

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Run `run`, wait for it, and return how many bytes more than before were taken at one time meanwhile.

        What is kept for later counts as taken. Nothing else is to run on the device. 0 where nobody has to know it.
        """
        ...

    def make_pool(self, layout: PoolLayout) -> Memory:
        """Reserve a KV pool. Raises ConfigError where it does not fit."""
        ...

    def activate(self) -> None:
        """Make it the current device of this thread."""
        ...

    def event(self) -> Event:
        """Return an event that is not recorded yet."""
        ...

    def new_stream(self) -> Callable[[], AbstractContextManager[object]]:
        """Make a stream; what is returned makes it this thread's current one within a block."""
        ...

    def synchronize(self) -> None:
        """Block this thread until all that was launched is done."""
        ...

    @property
    def captures_graphs(self) -> bool:
        """Whether `capture` works here."""
        ...

    def capture(self, run: Callable[[], None]) -> Graph:
        """Run `run` once for nothing, then once more as a graph's capture. Raises RuntimeError."""
        ...


class DeviceKind(Protocol):
    """A kind of device, whether this machine has one or not."""

    traits: Traits

    def sees_card(self) -> bool:
        """Whether this machine shows a card of this kind; cheap, imports no torch."""
        ...

    def lacking(self) -> str | None:
        """Return why none can be used here, in words, or None. Imports torch, and what the kind needs."""
        ...

    def open(self, index: int = 0) -> Device:
        """Open the index-th device that is shown to this process. Raises ConfigError, with `lacking`'s words."""
        ...
