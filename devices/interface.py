"""The interface between the product and the devices that it computes on. Imports no torch.

    table.py   device kinds by name; `choose` resolves --device
    cpu.py  cuda.py  npu.py   one file per kind: its Traits, why it cannot be used, how to open one of its devices
    torch_device.py           the common part of accelerators with a torch device module

A kind is looked up by name, checked with `lacking`, and opened, which returns a Device. What else a new kind needs:
"Where to change what" in docs/architecture.md.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from wire.kv_layout import PoolLayout

if TYPE_CHECKING:
    import torch

    from devices.shared_memory import SharedMemory


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties that all devices of one kind share.

    `kind` is the value of --device and the prefix of device names such as "npu:0". `visible_variable` is the variable
    that limits the cards a process can use. `collective` is its process group backend in torch. `block_size` and
    `prefill_chunk_size` (tokens) are the defaults of these flags. A pool's base address is a multiple of
    `pool_alignment` bytes. `attention` names its own attention backend. `pools_on_host`: its pools are in host memory,
    which peers may map and native kernels may read. `kept_linears` names the formats in which its linear layers and
    experts can stay quantised, best first (engine/quantization/kept_table.py). `is_asynchronous`: launches return
    before the work is done, so a step may be launched before the previous one is collected. `one_sided` is the protocol
    with which Mooncake's engine reads its memory (kvtransfer/mooncake_engine.py). `ray_resource` is Ray's name for one
    of its devices. `image` is the kind of container image for it, if that is not `kind`. `packages` are Python packages
    of its own, whose versions a bug report shows. `image_package` is the package with which torchvision prepares images
    on this kind of device.
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
    ray_resource: str = "CPU"
    image: str | None = None
    packages: tuple[str, ...] = ()
    image_package: str | None = None


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """A device's current memory figures, in bytes."""

    total: int
    free: int


class Memory(Protocol):
    """A KV pool. In host memory it has `buffer` and maybe `fd`, on a device `tensor` (kvtransfer/device_memory.py)."""

    layout: PoolLayout

    @property
    def fd(self) -> int | None:
        """The sealed memfd that contains the whole pool, or None."""
        ...

    @property
    def buffer(self) -> memoryview:
        """The whole pool as writable bytes. Raises TypeError for a pool in device memory."""
        ...

    def close(self) -> None:
        """Release the memory. Idempotent."""
        ...


class Event(Protocol):
    """A point in a stream of work. On a synchronous device every call is a no-op and `is_done` is true."""

    def record(self) -> None:
        """Record the work launched on this thread's current stream so far."""
        ...

    def wait(self) -> None:
        """Make this thread's current stream wait for the event; does not block the thread."""
        ...

    def synchronize(self) -> None:
        """Block this thread until the recorded work is done."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether the recorded work is done."""
        ...


class Graph(Protocol):
    """A captured sequence of launches over fixed memory."""

    def replay(self, host_lengths: "dict[str, list[int]] | None" = None) -> None:
        """Launch it again. `host_lengths` maps a keyword to the new contents of a list that ops read on the host."""
        ...


class Device(Protocol):
    """One open device. Owns only its handle; usable on any thread that has called `activate`."""

    traits: Traits

    @property
    def name(self) -> str:
        """Its kind and index, such as "cuda:0"; "cpu" has no index."""
        ...

    @property
    def torch_device(self) -> "torch.device":
        """The device of its tensors."""
        ...

    def describe(self) -> str:
        """Return one line for logs: the card, its memory, and the versions of its software stack."""
        ...

    def memory(self) -> DeviceBytes:
        """Return the current figures."""
        ...

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Run `run`, wait for it, and return the peak increase of allocated bytes during the run.

        Memory in the allocator's cache is included. Nothing else may run on the device. The CPU returns 0.
        """
        ...

    def make_pool(self, layout: PoolLayout) -> Memory:
        """Allocate a KV pool. Raises ConfigError if it does not fit."""
        ...

    def share_memory(self, num_bytes: int) -> "SharedMemory":
        """Allocate memory that child processes can map. Raises RuntimeError, also if this kind does not support it."""
        ...

    def map_shared(self, handle: str, fds: tuple[int, ...], num_bytes: int) -> "torch.Tensor":
        """Map the memory that the parent process shares, as uint8, [num_bytes]. Raises RuntimeError."""
        ...

    def activate(self) -> None:
        """Make it the current device of this thread."""
        ...

    def event(self) -> Event:
        """Return an event that is not recorded yet."""
        ...

    def new_stream(self) -> Callable[[], AbstractContextManager[object]]:
        """Make a stream; return a function whose context manager makes it this thread's current stream."""
        ...

    def synchronize(self) -> None:
        """Block this thread until all launched work is done."""
        ...

    @property
    def captures_graphs(self) -> bool:
        """Whether `capture` is supported."""
        ...

    @property
    def checks_in_child(self) -> bool:
        """Whether kernels are first run in a child process: an error may make the device unusable for the process."""
        ...

    def capture(self, run: Callable[[], None]) -> Graph:
        """Run `run` once as a warm-up, then capture it as a graph. Raises RuntimeError."""
        ...


class DeviceKind(Protocol):
    """A kind of device, whether this machine has one or not."""

    traits: Traits

    def sees_card(self) -> bool:
        """Return whether this machine has a card of this kind; cheap, imports no torch."""
        ...

    def lacking(self) -> str | None:
        """Return why no device of this kind can be used here, or None. Imports torch and the kind's packages."""
        ...

    def open(self, index: int = 0) -> Device:
        """Open the index-th device visible to this process. Raises ConfigError with the text of `lacking`."""
        ...
