"""The ranks of an instance's torch engine: how many, and on which cores each runs."""

import os
from collections.abc import Sequence
from pathlib import Path

from devices.cpu import TRAITS as CPU
from devices.table import AUTO, choose
from engine.ranks.team import OnLost
from engine.step import Model
from engine.torch_start import loading, prepare_torch
from instance.config import InstanceConfig


def deal_cores(cores: Sequence[int], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the cores of each rank's device: dealt evenly, in order; neighbours share one where there are too few."""
    dealt = []
    for rank in range(num_ranks):
        start, end = rank * len(cores) // num_ranks, (rank + 1) * len(cores) // num_ranks
        dealt.append(tuple(cores[start : max(end, start + 1)]))
    return tuple(dealt)


def ranks_model(config: InstanceConfig, on_lost: OnLost) -> tuple[Model, tuple[str, ...]]:
    """Load the model for several ranks; return it with notes. `on_lost` hears of a rank that is lost once it serves."""
    options = config.options
    cores = deal_cores(config.cores or sorted(os.sched_getaffinity(0)), config.num_ranks)
    num_threads = max(1, min(map(len, cores)))
    prepare_torch(num_threads)
    with loading():
        device = CPU.kind if options.device == AUTO else choose(options.device).kind.traits.kind
        from engine.ranks.load import RanksOptions, load_ranks

        ranks = RanksOptions(
            cores, num_threads, step_s=options.rank_timeout, log_level=options.log_level,
            log_format=options.log_format, device=device,
        )  # fmt: skip
        loaded = load_ranks(
            Path(options.model), dtype=options.dtype, block_size=config.block_size(device),
            kv_cache_memory=options.kv_cache_memory, ranks=ranks, on_lost=on_lost,
            attention_backend=options.attention_backend, max_model_len=options.max_model_len,
            quantization=options.quantization,
        )  # fmt: skip
    shown = "; ".join(",".join(map(str, own)) for own in cores)
    return loaded.model, (f"{config.num_ranks} ranks on cores {shown}", *loaded.notes)
