"""NVIDIA GPUs through torch.cuda."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from devices import versions
from devices.device_nodes import has_node
from devices.interface import Traits
from devices.torch_build import cuda_of_torch
from devices.torch_device import TorchDevice
from wire.errors import ConfigError

if TYPE_CHECKING:
    import torch

TRAITS = Traits(
    kind="cuda", visible_variable="CUDA_VISIBLE_DEVICES", collective="nccl", block_size=16, prefill_chunk_size=2048,
    pool_alignment=512, attention="cuda", is_asynchronous=True,
    kept_linears=(
        "int4pack", "int8", "int8-static", "float8", "float8-blocks", "widened", "experts-float8", "experts-widened",
    ),
    ray_resource="GPU", packages=("flashinfer-python", "flash-attn-3"),
)  # fmt: skip


def card_traits(capability: tuple[int, int]) -> Traits:
    """Return the traits of a GPU: weights stay in the formats that it can multiply."""
    return replace(TRAITS, kept_linears=tuple(name for name in TRAITS.kept_linears if _multiplies(name, capability)))


def _multiplies(name: str, capability: tuple[int, int]) -> bool:
    """Return whether torch multiplies this format; float8: ATen/native/cuda/ScaledBlas.cpp and GroupedBlas.cpp."""
    if name == "float8":
        return capability >= (8, 9)
    if name == "float8-blocks":
        return capability[0] == 9
    return name != "experts-float8" or capability in ((9, 0), (10, 0))


class CudaKind:
    """Implements DeviceKind."""

    traits = TRAITS

    def sees_card(self) -> bool:
        """Return whether /dev has a GPU's node; under WSL that is dxg."""
        return has_node(r"nvidia[0-9]+") or has_node("dxg")

    def lacking(self) -> str | None:
        """See DeviceKind. If torch is built without CUDA and no card is visible, does not import it: that is slow."""
        if cuda_of_torch() is None and not self.sees_card():
            return versions.cuda_mismatch(versions.cuda_versions(None))
        import torch

        if torch.version.cuda is not None and torch.cuda.is_available():
            return None
        found = versions.cuda_versions(torch.version.cuda)
        shown = versions.format_versions(found)
        return versions.cuda_mismatch(found) or f"torch {torch.__version__} sees no GPU ({shown})"

    def open(self, index: int = 0) -> "CudaDevice":
        """See DeviceKind."""
        lacking = self.lacking()
        if lacking is not None:
            raise ConfigError(f"--device cuda: {lacking}")
        import torch

        return CudaDevice(card_traits(torch.cuda.get_device_capability(index)), index)


class CudaDevice(TorchDevice):
    """Implements Device. Owns the stream and memory pool of all its graphs: one thread at a time uses them."""

    def __init__(self, traits: Traits, index: int) -> None:
        super().__init__(traits, index)
        self._graph_stream: torch.cuda.Stream | None = None
        self._graph_pool: Any = None
        self._graphs: weakref.WeakSet[CudaGraph] = weakref.WeakSet()

    def describe(self) -> str:
        """Return the card, its memory, and the versions of torch, CUDA and the driver."""
        import torch

        driver = versions.cuda_versions(torch.version.cuda).get("driver")
        return f"{super().describe()}, CUDA {torch.version.cuda}" + (f", driver {driver}" if driver else "")

    @property
    def captures_graphs(self) -> bool:
        """See Device."""
        return True

    @property
    def checks_in_child(self) -> bool:
        """See Device."""
        return True

    def capture(self, run: Callable[[], None]) -> "CudaGraph":
        """See Device. Other threads may keep using the device: only this thread's work is captured.

        Memory that a capture frees may be reused by the next one: graphs are replayed one after the other. torch's
        allocator refuses a memory pool whose graphs are all gone (c10/cuda/CUDACachingAllocator.cpp,
        create_or_incref_pool), so the next graph then gets a new one.
        """
        import torch

        if self._graph_stream is None:
            self._graph_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        if not self._graphs:
            self._graph_pool = torch.cuda.graph_pool_handle()
        stream, current = self._graph_stream, torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):  # libraries allocate on their first call, which a capture forbids
            run()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool, stream=stream, capture_error_mode="thread_local"):
            run()
        made = CudaGraph(graph)
        self._graphs.add(made)
        return made


class CudaGraph:
    """Implements Graph: replays on the thread's current stream."""

    def __init__(self, graph: "torch.cuda.CUDAGraph") -> None:
        self._graph = graph

    def replay(self, host_lengths: dict[str, list[int]] | None = None) -> None:
        """See Graph. Raises ValueError for `host_lengths`: no CUDA op reads lists from the host."""
        if host_lengths:
            raise ValueError(f"a CUDA graph does not support lists from the host: {', '.join(sorted(host_lengths))}")
        self._graph.replay()
