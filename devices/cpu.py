"""The CPU: pools are sealed memfds that peers map, and whatever is launched is done on return."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from devices.host_memory import available_bytes, total_bytes
from devices.host_pool import HostPool
from devices.interface import DeviceBytes, Graph, Traits
from wire.kv_layout import ALIGNMENT, PoolLayout

if TYPE_CHECKING:
    import torch

TRAITS = Traits(
    kind="cpu", visible_variable=None, collective="gloo", block_size=16, prefill_chunk_size=512,
    pool_alignment=ALIGNMENT, attention="cpu", pools_on_host=True,
)  # fmt: skip


class CpuKind:
    """Implements DeviceKind: it is everywhere."""

    traits = TRAITS

    def sees_card(self) -> bool:
        """There is always one."""
        return True

    def lacking(self) -> str | None:
        """Nothing is."""
        return None

    def open(self, index: int = 0) -> "CpuDevice":
        """Return the CPU; all indices are the same."""
        return CpuDevice()


class CpuDevice:
    """Implements Device."""

    traits = TRAITS
    name = "cpu"
    captures_graphs = False

    @property
    def torch_device(self) -> "torch.device":
        """Where its tensors lie."""
        import torch

        return torch.device("cpu")

    def describe(self) -> str:
        """Its memory."""
        return f"cpu: {total_bytes() / 2**30:.0f} GiB"

    def memory(self) -> DeviceBytes:
        """What the machine, or this container, has."""
        return DeviceBytes(total=total_bytes(), free=available_bytes())

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Pools are sized without it."""
        run()
        return 0

    def make_pool(self, layout: PoolLayout) -> HostPool:
        """See Device."""
        return HostPool(layout)

    def activate(self) -> None:
        """It is current everywhere."""

    def event(self) -> "DoneEvent":
        """See Device."""
        return DoneEvent()

    def new_stream(self) -> Callable[[], AbstractContextManager[object]]:
        """There is one stream, the thread itself."""
        return nullcontext

    def synchronize(self) -> None:
        """All is done."""

    def capture(self, run: Callable[[], None]) -> Graph:
        """There is nothing to save by it."""
        raise RuntimeError("cpu captures no graphs")


class DoneEvent:
    """Implements Event where work is done when it was launched."""

    is_done = True

    def record(self) -> None:
        """See Event."""

    def wait(self) -> None:
        """See Event."""

    def synchronize(self) -> None:
        """See Event."""
