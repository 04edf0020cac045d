"""The common part of accelerators that torch supports: streams, events and memory, through torch's device module.

torch is imported only inside methods, so that the file of a kind can be imported without it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from devices.interface import DeviceBytes, Traits
from wire.errors import ConfigError
from wire.kv_layout import PoolLayout

if TYPE_CHECKING:
    import torch

    from devices.device_pool import DevicePool
    from devices.shared_memory import SharedMemory


class TorchDevice:
    """Implements Device for a kind with a torch device module, such as torch.cuda; kinds override what differs."""

    def __init__(self, traits: Traits, index: int) -> None:
        import torch

        self.traits, self._index = traits, index
        self._device = torch.device(traits.kind, index)
        self._module: Any = torch.get_device_module(self._device)

    @property
    def name(self) -> str:
        """Its kind and index."""
        return f"{self.traits.kind}:{self._index}"

    @property
    def torch_device(self) -> "torch.device":
        """The device of its tensors."""
        return self._device

    def describe(self) -> str:
        """Return the card's name, its memory and torch's version."""
        import torch

        gib = self.memory().total / 2**30
        return f"{self.name}: {self._module.get_device_name(self._index)}, {gib:.0f} GiB, torch {torch.__version__}"

    def memory(self) -> DeviceBytes:
        """See Device."""
        free, total = self._module.mem_get_info(self._device)
        return DeviceBytes(total=int(total), free=int(free))

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """See Device. Measured by torch's allocator, whose cache is emptied before and after."""
        module, device = self._module, self._device
        module.synchronize(device)
        module.empty_cache()
        module.reset_peak_memory_stats(device)
        before = module.memory_reserved(device)
        try:
            run()
            module.synchronize(device)
            return int(module.max_memory_reserved(device) - before)
        finally:
            module.empty_cache()

    def make_pool(self, layout: PoolLayout) -> "DevicePool":
        """See Device."""
        from devices.device_pool import DevicePool

        try:
            return DevicePool(layout, self)
        except RuntimeError as error:  # torch's own OutOfMemoryError is one
            free = self.memory().free
            raise ConfigError(
                f"cannot make a KV pool of {layout.total_bytes} bytes on {self.name}, which has {free} free: {error}"
            ) from error

    def share_memory(self, num_bytes: int) -> "SharedMemory":
        """Raise RuntimeError; kinds that support it override this."""
        raise RuntimeError(f"{self.traits.kind} does not share memory with child processes")

    def map_shared(self, handle: str, fds: tuple[int, ...], num_bytes: int) -> "torch.Tensor":
        """Raise RuntimeError; kinds that support it override this."""
        raise RuntimeError(f"{self.traits.kind} does not share memory with child processes")

    def activate(self) -> None:
        """See Device."""
        self._module.set_device(self._index)

    def event(self) -> "TorchEvent":
        """See Device."""
        return TorchEvent(self._module)

    def new_stream(self) -> Callable[[], AbstractContextManager[object]]:
        """See Device."""
        stream = self._module.Stream(device=self._device)
        return lambda: self._module.stream(stream)

    def synchronize(self) -> None:
        """See Device."""
        self._module.synchronize(self._device)

    @property
    def captures_graphs(self) -> bool:
        """False; kinds that support it override this."""
        return False

    @property
    def checks_in_child(self) -> bool:
        """False; overridden by kinds where a kernel's error may make the device unusable for the whole process."""
        return False

    def capture(self, run: Callable[[], None]) -> Any:
        """Raise RuntimeError; kinds that support it override this."""
        raise RuntimeError(f"{self.traits.kind} does not support graph capture")


class TorchEvent:
    """An event of torch's device module."""

    def __init__(self, module: Any) -> None:
        self._event: Any = module.Event()

    def record(self) -> None:
        """See Event."""
        self._event.record()

    def wait(self) -> None:
        """See Event."""
        self._event.wait()

    def synchronize(self) -> None:
        """See Event."""
        self._event.synchronize()

    @property
    def is_done(self) -> bool:
        """See Event."""
        return bool(self._event.query())
