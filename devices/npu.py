"""Ascend NPUs through torch_npu."""

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import TYPE_CHECKING

from devices import npu_package, versions
from devices.device_nodes import has_node
from devices.interface import Traits
from devices.npu_graph import NpuGraph, NpuGraphs
from devices.torch_device import TorchDevice
from wire.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from devices.shared_memory import SharedMemory

TRAITS = Traits(
    kind="npu", visible_variable="ASCEND_RT_VISIBLE_DEVICES", collective="hccl", block_size=128,
    prefill_chunk_size=2048, pool_alignment=2 << 20, attention="npu",
    kept_linears=("npu-int8", "npu-int8-static", "npu-antiquant", "npu-experts-int8"), is_asynchronous=True,
    one_sided="ascend",
    ray_resource="NPU", image="ascend", packages=("torch_npu", "mooncake-transfer-engine-npu"),
    image_package="torchvision_npu",
)  # fmt: skip
MIN_VERSION = (2, 10)
"""The oldest usable torch_npu: in earlier ones npu_scatter_pa_kv_cache has no cache_mode, but a layout of its own."""


class NpuKind:
    """Implements DeviceKind."""

    traits = TRAITS

    def sees_card(self) -> bool:
        """Return whether /dev has an NPU's node."""
        return has_node(r"davinci[0-9]+")

    def lacking(self) -> str | None:
        """See DeviceKind: the package, its version, CANN or the card may be missing."""
        if not npu_package.show():
            seen = versions.format_versions(versions.npu_versions())
            return f"torch_npu is not installed: run scripts/install --device npu ({seen})"
        why = self._why_unfit()
        if why is not None:
            npu_package.hide()  # the CPU may be used instead, and transformers would import torch_npu
        return why

    def _why_unfit(self) -> str | None:
        version = importlib.metadata.version("torch_npu")
        if versions.numbers(version)[:2] < MIN_VERSION:
            return f"torch_npu {version} is too old: {'.'.join(map(str, MIN_VERSION))} or newer is needed"
        found = versions.npu_versions()
        mismatch, seen = versions.npu_mismatch(found), versions.format_versions(found)
        if mismatch is not None:
            return mismatch
        try:
            npu = importlib.import_module("torch_npu").npu
        except (ImportError, OSError, RuntimeError) as error:
            message = " ".join(str(error).split())
            return f"torch_npu {version} cannot be imported; CANN is missing or does not match: {message} ({seen})"
        return None if npu.is_available() else f"torch_npu {version} sees no NPU ({seen})"

    def open(self, index: int = 0) -> "NpuDevice":
        """See DeviceKind."""
        lacking = self.lacking()
        if lacking is not None:
            raise ConfigError(f"--device npu: {lacking}")
        return NpuDevice(TRAITS, index)


class NpuDevice(TorchDevice):
    """Implements Device. Owns the state for graph capture: one thread at a time captures or replays."""

    def __init__(self, traits: Traits, index: int) -> None:
        super().__init__(traits, index)
        self._graphs: NpuGraphs | None = None

    def describe(self) -> str:
        """Return the card, its memory, and the versions of torch and torch_npu."""
        return f"{super().describe()}, torch_npu {importlib.metadata.version('torch_npu')}"

    def share_memory(self, num_bytes: int) -> "SharedMemory":
        """See Device."""
        from devices.npu_memory import share_npu_memory

        return share_npu_memory(num_bytes, self._device)

    def map_shared(self, handle: str, fds: tuple[int, ...], num_bytes: int) -> "torch.Tensor":
        """See Device."""
        from devices.npu_memory import map_npu_memory

        return map_npu_memory(handle, num_bytes, self._device)

    @property
    def captures_graphs(self) -> bool:
        """See Device."""
        return True

    @property
    def checks_in_child(self) -> bool:
        """See Device."""
        return True

    def capture(self, run: Callable[[], None]) -> NpuGraph:
        """See Device."""
        if self._graphs is None:
            self._graphs = NpuGraphs(self._module)
        return self._graphs.capture(run)
