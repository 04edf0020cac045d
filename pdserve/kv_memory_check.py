"""Check --kv-cache-memory before anything starts, for models whose config.json gives the KV size of a token."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from devices.cpu import TRAITS as CPU
from devices.host_memory import available_bytes
from devices.table import AUTO, traits_of
from engine.checkpoints.dtypes import choose_dtype, read_cpu_flags
from engine.checkpoints.model_identity import read_json, stored_tensors
from engine.memory_plan import MIN_SEQUENCE_TOKENS, plan_pool
from engine.models.families import support_of
from flags.options import EngineOptions
from ranktable_tools.devices.kinds import find_kind as shown_kind
from wire.errors import ConfigError
from wire.kv_layout import KvTensor, PoolLayout, Rank

_STORED: Final[Mapping[str, str]] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def check_kv_room(options: EngineOptions, num_instances: int, *, is_here: bool) -> None:
    """Raise ConfigError, with both numbers, if the requested pool is too small for one sequence or exceeds free memory.

    `is_here`: all instances are on this machine. Models whose KV size is known only once loaded are not checked.
    """
    pool = options.kv_cache_memory
    if pool is None or options.engine == "fake" or not _is_on_host(options.device):
        return
    config = read_json(Path(options.model) / "config.json")
    tensors = kv_tensors(config, _dtype(options), options.tensor_parallel_size or 1)
    if tensors:
        length = options.max_model_len or config.get("max_position_embeddings") or MIN_SEQUENCE_TOKENS
        plan_pool(tensors, budget_bytes=pool, block_size=options.block_size or CPU.block_size, max_model_len=length)
    if is_here and pool * num_instances > (free := available_bytes()):
        raise ConfigError(
            f"--kv-cache-memory {pool} bytes in each of {num_instances} instances is {pool * num_instances} bytes, "
            f"but only {free} bytes are free"
        )


def _is_on_host(device: str) -> bool:
    """Return whether the pools are in host memory: free card memory is known only once the card is opened."""
    return traits_of(shown_kind() if device == AUTO else device).pools_on_host


def kv_tensors(config: Mapping[str, Any], dtype: str, num_ranks: int) -> tuple[KvTensor, ...]:
    """Return the KV tensors of all ranks of an instance; empty if config.json does not determine them."""
    try:
        family = support_of(config["model_type"])
        if family.kv_heads_key is None:
            return ()
        heads, layers = config[family.kv_heads_key], config["num_hidden_layers"]
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        if family.needs_head_dim:
            head_dim = config["head_dim"]
        one = [KvTensor(layer, name, heads, head_dim, dtype) for layer in range(layers) for name in ("k", "v")]
        ranks = [Rank(number, num_ranks) for number in range(num_ranks)]
        layouts = [PoolLayout(one, num_blocks=1, block_size=1, rank=rank) for rank in ranks]
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return ()
    return tuple(tensor for layout in layouts for tensor in layout.tensors)


def _dtype(options: EngineOptions) -> str:
    """Return the dtype of the KV; for `auto`, which depends on the kernels present, the smaller choice."""
    try:
        stored = (_STORED.get(tensor.dtype) for tensor in stored_tensors(Path(options.model)))
        own = next((dtype for dtype in stored if dtype is not None), "float32")
    except ConfigError:  # weights in another format: converted to safetensors when an instance starts
        own = "bfloat16"
    return choose_dtype(options.dtype, own, cpu_flags=read_cpu_flags(), is_native=True).name
