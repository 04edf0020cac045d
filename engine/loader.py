"""Load a TorchModel from a model folder: checks, weights, KV layout, pool, attention backend."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from devices.cpu import CpuDevice
from devices.interface import Device
from devices.table import AUTO
from engine.attention.backend_choice import trusted
from engine.attention.backends import make_backend
from engine.attention.interface import AttentionBackend, GraphBackend
from engine.attention.registered import register
from engine.checkpoints.checkpoint import Checkpoint, model_length
from engine.checkpoints.dtypes import DtypeChoice, choose_dtype, read_cpu_flags
from engine.decode_graphs import graph_rows, num_spare_blocks
from engine.device_modules import find_nucleus, give_back, replace_modules
from engine.fused.area import SharedWeights, shared_weights
from engine.fused.decoder import FusedWeights
from engine.fused.fuse import fuse, will_fuse
from engine.fused.kernels import NO_KERNELS, Kernels, find_kernels
from engine.headroom import Headroom, LargestStep, measure_headroom, num_blocks
from engine.interface import EngineInfo
from engine.kv_probe import find_kv_tensors, rehearse
from engine.memory_plan import MemoryPlan, cpu_budget, device_budget, plan_pool
from engine.model_folder import ModelFolder, describe, open_folder, read_network
from engine.rope import StepRope, rotate_by_sequence
from engine.sampling.sampler import Nucleus
from engine.step_limit import DEFAULT_STEP_S
from engine.torch_model import TorchModel
from native.engine_library import Threads
from wire.kv_layout import KvTensor, PoolLayout


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and notes for the user about how it was loaded, one line each."""

    model: TorchModel
    notes: tuple[str, ...]


def load_model(
    path: Path,
    *,
    dtype: str,
    block_size: int,
    kv_cache_memory: int | None,
    num_threads: int,
    attention_backend: str = AUTO,
    max_model_len: int | None = None,
    name: str | None = None,
    quantization: str | None = None,
    device: Device | None = None,
    gpu_memory_utilization: float = 0.9,
    max_graph_rows: int = 0,
    largest_step: LargestStep | None = None,
    step_s: float = DEFAULT_STEP_S,
    on_read: Callable[[], None] = lambda: None,
    on_capture: Callable[[], None] = lambda: None,
    weights_fd: str = "",
) -> LoadedModel:
    """Load the checkpoint in folder `path` on `device` (default: the CPU); `name` defaults to the folder's name.

    `kv_cache_memory` is in bytes; None sizes the pool automatically and leaves device memory free for `largest_step`.
    `quantization` must be the checkpoint's; None uses it. Steps of up to `max_graph_rows` sequences are replayed from
    graphs, where the device and the model allow it. `step_s` is the time limit of a step. `on_read` is called when
    reading the weights starts, `on_capture` when capturing graphs does; `weights_fd` names a memfd for packed weights.
    Sets torch's thread count for the whole process. Raises ConfigError, before the weights are read if the config shows
    the error.
    """
    device = device or CpuDevice()
    device.activate()
    kernels = find_kernels(num_threads) if device.traits.pools_on_host else NO_KERNELS
    backend = make_backend(attention_backend, device, kernels.threads)
    folder = open_folder(path, quantization)
    length = model_length(folder.checkpoint, max_model_len)
    choice = _choose_dtype(folder.checkpoint, dtype, device, kernels)
    torch.set_num_threads(num_threads)
    register()
    shared = _find_shared_weights(path, choice.name, kernels.threads, weights_fd)
    weights = _read_weights(folder, choice.name, kernels.threads, device, on_read, shared)
    backend, warning = trusted(
        backend, weights.network, device, block_size=block_size, dtype=getattr(torch, choice.name)
    )  # fmt: skip
    rope = rotate_by_sequence(weights.network)
    info = describe(
        folder, weights.network, name=name, max_model_len=max_model_len, dtype=choice.name,
        layout=PoolLayout(weights.kv_tensors, num_blocks=1, block_size=block_size), device=device.name,
    )  # fmt: skip
    poolless = _PoollessModel(
        weights, info, backend, rope, device, folder.checkpoint.keeps_logits,
        graph_rows=graph_rows(max_graph_rows, device, backend, rope), step_s=step_s,
        nucleus=find_nucleus(device, info.vocab_size),
    )  # fmt: skip
    plan = poolless.plan(kv_cache_memory, gpu_memory_utilization, largest_step, length)
    attention: str | None = getattr(backend, "note", None)
    notes = (choice.reason, plan.describe(), kernels.note, attention, warning, *weights.notes)
    return LoadedModel(poolless.on_pool(plan.num_blocks, on_capture), tuple(note for note in notes if note))


@dataclass(frozen=True, slots=True)
class _ReadWeights:
    """A network with its weights, the fused weights where native kernels run it, and its KV tensors."""

    network: Any
    fused: FusedWeights | None
    kv_tensors: tuple[KvTensor, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _PoollessModel:
    """A model without its pool; its info has the layout of a single block."""

    weights: _ReadWeights
    info: EngineInfo
    backend: AttentionBackend
    rope: StepRope | None
    device: Device
    keeps_logits: bool
    graph_rows: int
    step_s: float
    nucleus: Nucleus | None

    @property
    def spare_blocks(self) -> int:
        """The extra blocks that only padding rows of graphs write to."""
        return num_spare_blocks(self.graph_rows, self.info.layout.block_size)

    def plan(
        self, requested: int | None, utilization: float, largest: LargestStep | None, max_model_len: int
    ) -> MemoryPlan:  # fmt: skip
        """Plan the pool of the requested bytes, or of those that weights and `largest` leave. Raises ConfigError."""
        headroom = Headroom()
        if largest is not None and requested is None and not self.device.traits.pools_on_host:
            headroom = self._headroom(largest)
        return plan_pool(
            self.weights.kv_tensors, budget_bytes=_budget(self.device, requested, utilization, headroom),
            block_size=self.info.layout.block_size, max_model_len=max_model_len, reserve_note=headroom.describe(),
            spare_blocks=self.spare_blocks,
        )  # fmt: skip

    def _headroom(self, largest: LargestStep) -> Headroom:
        """Measure the memory steps need besides weights and pool. Raises ConfigError if a step does not fit."""
        smallest = num_blocks(self.info, largest, self.graph_rows)
        graphs = self.backend if isinstance(self.backend, GraphBackend) else None
        return measure_headroom(
            lambda: self._make_model(smallest, 0, 0), self.device, largest, graph_rows=self.graph_rows, graphs=graphs
        )  # fmt: skip

    def on_pool(self, blocks: int, on_capture: Callable[[], None]) -> TorchModel:
        """Make a pool of that many blocks, and the model that runs on it, with its graphs captured."""
        model = self._make_model(blocks, self.spare_blocks, self.graph_rows)
        if self.graph_rows:
            on_capture()
            model.capture_graphs()
            give_back(self.device)
        return model

    def _make_model(self, blocks: int, spare: int, graph_rows: int) -> TorchModel:
        return TorchModel(
            self.weights.network, info=replace(self.info, layout=self._layout(blocks)), backend=self.backend,
            rope=self.rope, memory=self.device.make_pool(self._layout(blocks + spare)), keeps_logits=self.keeps_logits,
            fused=self.weights.fused, device=self.device, graph_rows=graph_rows, step_s=self.step_s,
            nucleus=self.nucleus,
        )  # fmt: skip

    def _layout(self, blocks: int) -> PoolLayout:
        return PoolLayout(self.weights.kv_tensors, num_blocks=blocks, block_size=self.info.layout.block_size)


def _choose_dtype(checkpoint: Checkpoint, dtype: str, device: Device, kernels: Kernels) -> DtypeChoice:
    is_native = will_fuse(checkpoint.config, kernels)
    flags = read_cpu_flags() if device.traits.pools_on_host else None
    return choose_dtype(dtype, checkpoint.stored_dtype, cpu_flags=flags, is_native=is_native)


def _budget(device: Device, requested: int | None, utilization: float, headroom: Headroom) -> int:
    """Return the pool's bytes; the weights are loaded and count as memory in use."""
    now = device.memory()
    if device.traits.pools_on_host:
        return cpu_budget(requested, now.free)
    return device_budget(requested, utilization, now.total, now.free, headroom.total_bytes)


def _find_shared_weights(path: Path, dtype: str, threads: Threads | None, weights_fd: str) -> SharedWeights | None:
    if threads is None:
        return None
    return shared_weights(path, dtype, threads.isa, threads.library.path.name, text=weights_fd)


def _read_weights(
    folder: ModelFolder, dtype: str, threads: Threads | None, device: Device, on_read: Callable[[], None],
    shared: SharedWeights | None,
) -> _ReadWeights:  # fmt: skip
    """Read the weights, after refusing an unsupported model if its KV tensors can be found without them."""
    rehearsed = rehearse(folder.checkpoint, dtype)
    on_read()
    read = read_network(folder, dtype, device=device.torch_device, kept_linears=device.traits.kept_linears)
    network = read.loaded.network
    known = None if read.kept_bytes else rehearsed  # layers that stay quantised are run once before serving
    tensors = known or find_kv_tensors(network, folder.checkpoint, dtype)
    fused = fuse(network, threads=threads, shared=shared) if device.traits.pools_on_host else None
    return _ReadWeights(network, fused, tensors, (*read.notes, *replace_modules(network, device)))
