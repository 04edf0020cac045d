"""From a model folder to a TorchModel that runs: checks, weights, KV layout, pool, attention backend."""

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.attention.cpu import CpuAttention
from engine.attention.interface import AttentionBackend
from engine.attention.reference import ReferenceAttention
from engine.attention.registered import register
from engine.checkpoint import model_length
from engine.dtypes import choose_dtype, read_cpu_flags
from engine.fuse import fuse, will_fuse
from engine.host_memory import available_bytes
from engine.host_pool import HostPool
from engine.kernels import find_kernels
from engine.kv_probe import find_kv_tensors, rehearse
from engine.memory_plan import cpu_budget, plan_pool
from engine.model_folder import describe, open_folder, read_network
from engine.rope import rotate_by_sequence
from engine.torch_model import TorchModel
from native.engine_library import Threads
from wire.errors import ConfigError
from wire.kv_layout import PoolLayout

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
    checkpoint = folder.checkpoint
    length = model_length(checkpoint, max_model_len)
    is_native = will_fuse(checkpoint.config, kernels)
    choice = choose_dtype(dtype, checkpoint.stored_dtype, cpu_flags=read_cpu_flags(), is_native=is_native)
    torch.set_num_threads(num_threads)
    register()
    foreseen = rehearse(checkpoint, choice.name)
    read = read_network(folder, choice.name)
    network = read.loaded.network
    tensors = foreseen or find_kv_tensors(network, checkpoint, choice.name)
    fused = fuse(network, threads=kernels.threads)
    budget = cpu_budget(kv_cache_memory, available_bytes())
    plan = plan_pool(tensors, budget_bytes=budget, block_size=block_size, max_model_len=length)
    layout = PoolLayout(tensors, num_blocks=plan.num_blocks, block_size=block_size)
    info = describe(
        folder, network, name=name, max_model_len=max_model_len, dtype=choice.name, layout=layout
    )  # fmt: skip
    model = TorchModel(
        network,
        info=info,
        memory=HostPool(layout),
        backend=backend,
        keeps_logits=checkpoint.keeps_logits,
        rope=rotate_by_sequence(network),
        fused=fused,
    )
    return LoadedModel(model, (choice.reason, plan.describe(), kernels.note, *read.notes))


def make_backend(name: str, threads: Threads | None = None) -> AttentionBackend:
    """Return the attention backend of this name; the CPU's own uses `threads`. Raises ConfigError."""
    if name == "reference":
        return ReferenceAttention()
    if name in _BACKENDS:
        return CpuAttention(threads)
    raise ConfigError(f"attention backend {name!r} is not one of {', '.join(_BACKENDS)}")
