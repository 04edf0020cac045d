"""The ranks of an instance's torch engine: their number, the cores each runs on, and the card visible to each."""

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from devices.cpu import TRAITS as CPU
from devices.interface import Traits
from devices.table import AUTO, AUTO_ORDER, choose, find_kind, traits_of
from engine.ranks.team import PROGRAM, OnLost
from engine.step import Model
from engine.torch_start import loading, prepare_torch
from instance.config import InstanceConfig
from wire.errors import ConfigError

DEVICE_PROGRAM = "instance.rank_process"
"""The program of a rank whose pool is on its own device: it transfers its own KV."""


def deal_cores(cores: Sequence[int], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the cores of each rank's device, divided evenly in order; ranks share a core where there are too few."""
    dealt = []
    for rank in range(num_ranks):
        start, end = rank * len(cores) // num_ranks, (rank + 1) * len(cores) // num_ranks
        dealt.append(tuple(cores[start : max(end, start + 1)]))
    return tuple(dealt)


def deal_cards(traits: Traits, num_ranks: int, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the value of the kind's visibility variable for each rank: one card each, in this process's order.

    Raises ConfigError, with both numbers, if too few cards are visible, and for a card named twice. Empty for a
    kind that has no such variable.
    """
    variable = traits.visible_variable
    if variable is None:
        return ()
    shown = environ.get(variable)
    if shown is None:
        return tuple(str(rank) for rank in range(num_ranks))
    names = _shown_cards(shown)
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise ConfigError(f"{variable}={shown!r} names card {twice} twice: each rank needs its own")
    if len(names) < num_ranks:
        raise ConfigError(
            f"{variable}={shown!r} shows too few cards for {num_ranks} ranks: it shows {len(names)}, "
            "but each rank needs its own"
        )
    return names[:num_ranks]


def _shown_cards(shown: str) -> tuple[str, ...]:
    """Return the cards listed in the variable's value, up to the first negative one, as CUDA reads it."""
    names = (name.strip() for name in shown.split(",") if name.strip())
    return tuple(takewhile(lambda name: not name.startswith("-"), names))


def ranks_model(
    config: InstanceConfig, on_lost: OnLost, on_capture: Callable[[], None] = lambda: None
) -> tuple[Model, tuple[str, ...]]:  # fmt: skip
    """Load the model for several ranks; return it with notes. `on_lost` is called if a rank is lost once all are
    connected.

    `on_capture` is called when capturing graphs starts.
    """
    options = config.options
    cores = deal_cores(config.cores or sorted(os.sched_getaffinity(0)), config.num_ranks)
    num_threads = max(1, min(*map(len, cores), config.num_threads // config.num_ranks))
    prepare_torch(num_threads)
    with loading():
        device = CPU.kind if options.device == AUTO else choose(options.device).kind.traits.kind
        from engine.headroom import LargestStep
        from engine.ranks.load import RanksOptions, load_ranks

        traits = traits_of(device)
        ranks = RanksOptions(
            cores, num_threads, step_s=options.rank_timeout, log_level=options.log_level,
            log_format=options.log_format, device=device, visible=deal_cards(traits, config.num_ranks, os.environ),
            gpu_memory_utilization=options.gpu_memory_utilization,
            largest_step=LargestStep(config.prefill_chunk_size(device), options.max_num_seqs),
            max_graph_rows=0 if options.enforce_eager else options.max_num_seqs,
            program=PROGRAM if traits.pools_on_host else DEVICE_PROGRAM,
        )  # fmt: skip
        loaded = load_ranks(
            Path(options.model), dtype=options.dtype, block_size=config.block_size(device),
            kv_cache_memory=options.kv_cache_memory, ranks=ranks, on_lost=on_lost,
            attention_backend=options.attention_backend, max_model_len=options.max_model_len,
            quantization=options.quantization, on_capture=on_capture,
        )  # fmt: skip
    shown = "; ".join(",".join(map(str, own)) for own in cores)
    return loaded.model, (f"{config.num_ranks} ranks on cores {shown}", *_unused_cards(options.device), *loaded.notes)


def _unused_cards(device: str) -> tuple[str, ...]:
    """Return a note for each kind of card that several ranks leave unused because --device is auto."""
    cards = [name for name in AUTO_ORDER if name != CPU.kind and find_kind(name).sees_card()] if device == AUTO else []
    return tuple(
        f"ranks on the CPU: --device auto uses {name} for one rank only; --device {name} selects it" for name in cards
    )
