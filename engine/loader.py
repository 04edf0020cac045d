"""From a model folder to a TorchModel that runs: checks, weights, KV layout, pool, attention backend."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.attention.cpu import CpuAttention
from engine.attention.interface import AttentionBackend
from engine.attention.reference import ReferenceAttention
from engine.attention.registered import register
from engine.checkpoint import model_length
from engine.dtypes import choose_dtype, read_cpu_flags
from engine.fuse import fuse, will_fuse
from engine.fused_decoder import FusedWeights
from engine.host_memory import available_bytes
from engine.host_pool import HostPool
from engine.kernels import find_kernels
from engine.kv_probe import find_kv_tensors, rehearse
from engine.memory_plan import cpu_budget, plan_pool
from engine.model_folder import ModelFolder, describe, open_folder, read_network
from engine.rope import rotate_by_sequence
from engine.torch_model import TorchModel
from native.engine_library import Threads
from wire.errors import ConfigError
from wire.kv_layout import KvTensor, PoolLayout

_BACKENDS = ("auto", "cpu", "reference")


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
    attention_backend: str = "auto",
    max_model_len: int | None = None,
    name: str | None = None,
    quantization: str | None = None,
) -> LoadedModel:
    """Load the checkpoint in folder `path` on the CPU; `name` is the identity's, the folder's own by default.

    `kv_cache_memory` is in bytes, None chooses; `quantization` must be what the checkpoint says, None takes that. Sets
    torch's thread count for the whole process. Raises ConfigError, before the weights are read where the config tells.
    """
    kernels = find_kernels(num_threads)
    backend = make_backend(attention_backend, kernels.threads)
    folder = open_folder(path, quantization)
    length = model_length(folder.checkpoint, max_model_len)
    is_native = will_fuse(folder.checkpoint.config, kernels)
    choice = choose_dtype(dtype, folder.checkpoint.stored_dtype, cpu_flags=read_cpu_flags(), is_native=is_native)
    torch.set_num_threads(num_threads)
    register()
    weights = _read_weights(folder, choice.name, kernels.threads)
    budget = cpu_budget(kv_cache_memory, available_bytes())
    plan = plan_pool(weights.kv_tensors, budget_bytes=budget, block_size=block_size, max_model_len=length)
    layout = PoolLayout(weights.kv_tensors, num_blocks=plan.num_blocks, block_size=block_size)
    info = describe(
        folder, weights.network, name=name, max_model_len=max_model_len, dtype=choice.name, layout=layout
    )  # fmt: skip
    model = TorchModel(
        weights.network, info=info, memory=HostPool(layout), backend=backend,
        keeps_logits=folder.checkpoint.keeps_logits, rope=rotate_by_sequence(weights.network), fused=weights.fused,
    )  # fmt: skip
    return LoadedModel(model, (choice.reason, plan.describe(), kernels.note, *weights.notes))


@dataclass(frozen=True, slots=True)
class _ReadWeights:
    """A network with its weights, what became of them where native kernels run it, and the KV of one token."""

    network: Any
    fused: FusedWeights | None
    kv_tensors: tuple[KvTensor, ...]
    notes: tuple[str, ...]


def _read_weights(folder: ModelFolder, dtype: str, threads: Threads | None) -> _ReadWeights:
    """Read the weights; a model whose KV can be told without them is refused before, where it has to be."""
    foreseen = rehearse(folder.checkpoint, dtype)
    read = read_network(folder, dtype)
    network = read.loaded.network
    tensors = foreseen or find_kv_tensors(network, folder.checkpoint, dtype)
    return _ReadWeights(network, fuse(network, threads=threads), tensors, read.notes)


def make_backend(name: str, threads: Threads | None = None) -> AttentionBackend:
    """Return the attention backend of this name; the CPU's own uses `threads`. Raises ConfigError."""
    if name == "reference":
        return ReferenceAttention()
    if name in _BACKENDS:
        return CpuAttention(threads)
    raise ConfigError(f"attention backend {name!r} is not one of {', '.join(_BACKENDS)}")
