"""The CPU device: pools are sealed memfds that peers map, and every launch is synchronous."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from devices.host_memory import available_bytes, total_bytes
from devices.host_pool import HostPool
from devices.interface import DeviceBytes, Graph, Traits
from devices.shared_memory import SharedMemory, map_host_memory, share_host_memory
from wire.kv_layout import ALIGNMENT, PoolLayout

if TYPE_CHECKING:
    import torch

TRAITS = Traits(
    kind="cpu", visible_variable=None, collective="gloo", block_size=16, prefill_chunk_size=512,
    pool_alignment=ALIGNMENT, attention="cpu", pools_on_host=True,
)  # fmt: skip


class CpuKind:
    """Implements DeviceKind; always available."""

    traits = TRAITS

    def sees_card(self) -> bool:
        """Return True: there is always a CPU."""
        return True

    def lacking(self) -> str | None:
        """Return None: the CPU can always be used."""
        return None

    def open(self, index: int = 0) -> "CpuDevice":
        """Return the CPU; the index is ignored."""
        return CpuDevice()


class CpuDevice:
    """Implements Device."""

    traits = TRAITS
    name = "cpu"
    captures_graphs = False
    checks_in_child = False

    @property
    def torch_device(self) -> "torch.device":
        """The device of its tensors."""
        import torch

        return torch.device("cpu")

    def describe(self) -> str:
        """Return its name and memory."""
        return f"cpu: {total_bytes() / 2**30:.0f} GiB"

    def memory(self) -> DeviceBytes:
        """Return the memory of the machine, or of this container."""
        return DeviceBytes(total=total_bytes(), free=available_bytes())

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Run `run` and return 0: the size of a CPU pool does not depend on the peak."""
        run()
        return 0

    def make_pool(self, layout: PoolLayout) -> HostPool:
        """See Device."""
        return HostPool(layout)

    def share_memory(self, num_bytes: int) -> SharedMemory:
        """See Device."""
        return share_host_memory(num_bytes)

    def map_shared(self, handle: str, fds: tuple[int, ...], num_bytes: int) -> "torch.Tensor":
        """See Device."""
        return map_host_memory(fds[0], num_bytes)

    def activate(self) -> None:
        """Do nothing: the CPU is current on every thread."""

    def event(self) -> "DoneEvent":
        """See Device."""
        return DoneEvent()

    def new_stream(self) -> Callable[[], AbstractContextManager[object]]:
        """Return a no-op context: the thread itself is the only stream."""
        return nullcontext

    def synchronize(self) -> None:
        """Do nothing: launches are synchronous."""

    def capture(self, run: Callable[[], None]) -> Graph:
        """Raise RuntimeError: there is no launch overhead to save."""
        raise RuntimeError("cpu does not support graph capture")


class DoneEvent:
    """Implements Event for a device whose launches are synchronous."""

    is_done = True

    def record(self) -> None:
        """See Event."""

    def wait(self) -> None:
        """See Event."""

    def synchronize(self) -> None:
        """See Event."""
