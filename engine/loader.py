"""From a model folder to a TorchModel that runs: checks, weights, KV layout, pool, attention backend."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from devices.cpu import CpuDevice
from devices.interface import Device
from devices.table import AUTO
from engine.attention.interface import GraphBackend
from engine.attention.registered import register
from engine.attention.table import make_backend
from engine.attention.trusted import trusted
from engine.checkpoints.checkpoint import model_length
from engine.checkpoints.dtypes import choose_dtype, read_cpu_flags
from engine.decode_graphs import graph_rows
from engine.device_modules import replace_modules
from engine.fused.decoder import FusedWeights
from engine.fused.fuse import fuse, will_fuse
from engine.fused.kernels import NO_KERNELS, find_kernels
from engine.headroom import Headroom, LargestStep, measure_headroom, num_blocks
from engine.kv_probe import find_kv_tensors, rehearse
from engine.memory_plan import cpu_budget, device_budget, plan_pool
from engine.model_folder import ModelFolder, describe, open_folder, read_network
from engine.rope import rotate_by_sequence
from engine.step_limit import DEFAULT_STEP_S
from engine.torch_model import TorchModel
from native.engine_library import Threads
from wire.kv_layout import KvTensor, PoolLayout


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to step, and what the user should know of how it was loaded, one line each."""

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
) -> LoadedModel:
    """Load the checkpoint in folder `path` on `device` (the CPU); `name` is the identity's, by default the folder's.

    `kv_cache_memory` is in bytes, None chooses; `quantization` must be what the checkpoint says, None takes that. Steps
    of up to `max_graph_rows` sequences are replayed from graphs, where the device and the model allow it. A pool whose
    size is ours to choose leaves memory of the device for `largest_step`. A step may take `step_s`. Sets torch's thread
    count for the whole process. Raises ConfigError, before the weights are read where the config tells.
    """
    device = device or CpuDevice()
    device.activate()
    kernels = find_kernels(num_threads) if device.traits.pools_on_host else NO_KERNELS
    backend = make_backend(attention_backend, device, kernels.threads)
    folder = open_folder(path, quantization)
    length = model_length(folder.checkpoint, max_model_len)
    is_native = will_fuse(folder.checkpoint.config, kernels)
    flags = read_cpu_flags() if device.traits.pools_on_host else None
    choice = choose_dtype(dtype, folder.checkpoint.stored_dtype, cpu_flags=flags, is_native=is_native)
    torch.set_num_threads(num_threads)
    register()
    weights = _read_weights(folder, choice.name, kernels.threads, device)
    backend, warning = trusted(
        backend, weights.network, device, block_size=block_size, dtype=getattr(torch, choice.name)
    )  # fmt: skip
    rope = rotate_by_sequence(weights.network)
    rows = graph_rows(max_graph_rows, device, backend, rope)
    spare = 1 if rows else 0  # a block of the pool that only rows of padding write to

    def layout_of(blocks: int) -> PoolLayout:
        return PoolLayout(weights.kv_tensors, num_blocks=blocks, block_size=block_size)

    info = describe(
        folder, weights.network, name=name, max_model_len=max_model_len, dtype=choice.name, layout=layout_of(1),
        device=device.name,
    )  # fmt: skip

    def model_on(blocks: int, spare: int, rows: int) -> TorchModel:
        return TorchModel(
            weights.network, info=replace(info, layout=layout_of(blocks)), backend=backend, rope=rope,
            memory=device.make_pool(layout_of(blocks + spare)), keeps_logits=folder.checkpoint.keeps_logits,
            fused=weights.fused, device=device, graph_rows=rows, step_s=step_s,
        )  # fmt: skip

    headroom = Headroom()
    if largest_step is not None and kv_cache_memory is None and not device.traits.pools_on_host:
        smallest = num_blocks(info, largest_step, rows)
        graphs = backend if isinstance(backend, GraphBackend) else None
        headroom = measure_headroom(
            lambda: model_on(smallest, 0, 0), device, largest_step, graph_rows=rows, graphs=graphs
        )  # fmt: skip
    budget = _budget(device, kv_cache_memory, gpu_memory_utilization, headroom)
    budget -= spare * block_size * sum(tensor.token_bytes for tensor in weights.kv_tensors)
    plan = plan_pool(
        weights.kv_tensors, budget_bytes=budget, block_size=block_size, max_model_len=length, beside=headroom.describe()
    )  # fmt: skip
    model = model_on(plan.num_blocks, spare, rows)
    attention: str | None = getattr(backend, "note", None)
    notes = (choice.reason, plan.describe(), kernels.note, attention, warning, *weights.notes)
    return LoadedModel(model, tuple(note for note in notes if note))


@dataclass(frozen=True, slots=True)
class _ReadWeights:
    """A network with its weights, what became of them where native kernels run it, and the KV of one token."""

    network: Any
    fused: FusedWeights | None
    kv_tensors: tuple[KvTensor, ...]
    notes: tuple[str, ...]


def _budget(device: Device, asked: int | None, utilization: float, headroom: Headroom) -> int:
    """Return the pool's bytes; the weights are loaded and count as in use."""
    now = device.memory()
    if device.traits.pools_on_host:
        return cpu_budget(asked, now.free)
    return device_budget(asked, utilization, now.total, now.free, headroom.total_bytes)


def _read_weights(folder: ModelFolder, dtype: str, threads: Threads | None, device: Device) -> _ReadWeights:
    """Read the weights; a model whose KV can be told without them is refused before, where it has to be."""
    foreseen = rehearse(folder.checkpoint, dtype)
    read = read_network(folder, dtype, device=device.torch_device, kept_linears=device.traits.kept_linears)
    network = read.loaded.network
    known = None if read.has_kept else foreseen  # a layer that was replaced runs once before it serves
    tensors = known or find_kv_tensors(network, folder.checkpoint, dtype)
    fused = fuse(network, threads=threads) if device.traits.pools_on_host else None
    return _ReadWeights(network, fused, tensors, (*read.notes, *replace_modules(network, device)))
