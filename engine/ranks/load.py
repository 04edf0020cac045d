"""Load a model folder into a ShardedModel: all ranks load their slices at the same time, then the pools are made.

rank 0: check -> start the others -> load own part -> LOADED -> pools, MAPPED -> CONNECT, READY -> serve
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from devices.table import AUTO, open_device, traits_of
from engine.attention.table import make_backend
from engine.checkpoints.checkpoint import Checkpoint, model_length
from engine.checkpoints.dtypes import choose_dtype, read_cpu_flags
from engine.fused.fuse import will_fuse
from engine.fused.kernels import NO_KERNELS, find_kernels
from engine.headroom import LargestStep
from engine.kv_probe import rehearse
from engine.model_folder import describe, open_folder
from engine.network import build_network
from engine.ranks.budget import with_budget
from engine.ranks.channel import RankMessageKind
from engine.ranks.model import ShardedModel
from engine.ranks.pools import make_device_pools, make_host_pools, plan_devices, plan_host
from engine.ranks.rank_part import SHARED, RankPart, load_part
from engine.ranks.reduce import Reduce
from engine.ranks.setup import RankLoaded, RankSetup
from engine.ranks.sums import ReduceFailed, collective_for_ranks
from engine.ranks.team import PROGRAM, OnLost, Team
from engine.sharding.cut import check_shards
from processes.rank_payloads import from_json
from telemetry.logs import EventLogger
from wire.errors import ConfigError
from wire.kv_layout import KvTensor, PoolLayout

_log = EventLogger("engine")

_MIB = 1 << 20
_CONNECT_S = 60.0


@dataclass(frozen=True, slots=True)
class RanksOptions:
    """The number of ranks, their devices, and their timeouts: `step_s` within a step, `load_s` for the weights.

    `cores` has the cores of each rank's device (empty: all of this process's), `device` is their kind and `visible` the
    value of the kind's variable for each rank (empty: unchanged). `gpu_memory_utilization`: the share of a device that
    its rank takes, including its `largest_step`. The other ranks' processes run the module `program`.
    """

    cores: tuple[tuple[int, ...], ...]
    num_threads: int
    step_s: float = 10.0
    load_s: float = 1800.0
    log_level: str = "INFO"
    log_format: str = "text"
    device: str = "cpu"
    visible: tuple[str, ...] = ()
    gpu_memory_utilization: float = 0.9
    largest_step: LargestStep | None = None
    program: str = PROGRAM

    @property
    def num_ranks(self) -> int:
        """Ranks of the instance."""
        return len(self.cores)


@dataclass(frozen=True, slots=True)
class LoadedRanks:
    """A model ready to step, and notes for the user on how it was loaded, one line each."""

    model: ShardedModel
    notes: tuple[str, ...]


def load_ranks(
    path: Path, *, dtype: str, block_size: int, kv_cache_memory: int | None, ranks: RanksOptions, on_lost: OnLost,
    attention_backend: str = AUTO, max_model_len: int | None = None, quantization: str | None = None,
) -> LoadedRanks:  # fmt: skip
    """Load the checkpoint for several ranks; see load_model. `on_lost` is called once when one of them is lost.

    Raises ConfigError, before weights are read, if the model cannot be cut, and InstanceLost if a rank ends meanwhile.
    """
    collective = collective_for_ranks(ranks.device)
    on_host = traits_of(ranks.device).pools_on_host
    make_backend(attention_backend, open_device(ranks.device))
    folder = open_folder(path, quantization)
    checkpoint = folder.checkpoint
    length = model_length(checkpoint, max_model_len)
    kernels = find_kernels(1) if on_host else NO_KERNELS
    is_native = will_fuse(checkpoint.config, kernels)
    flags = read_cpu_flags() if on_host else None
    choice = choose_dtype(dtype, checkpoint.stored_dtype, cpu_flags=flags, is_native=is_native)
    check_shards(
        build_network(checkpoint, dtype=choice.name, attention=None), checkpoint.text_config, ranks.num_ranks
    )  # fmt: skip
    largest = None if ranks.largest_step is None else dataclasses.astuple(ranks.largest_step)
    setups = [
        RankSetup(
            path=str(path), dtype=choice.name, number=number, of=ranks.num_ranks, block_size=block_size,
            attention_backend=attention_backend, quantization=quantization, cores=cores,
            num_threads=ranks.num_threads, step_s=ranks.step_s, is_native=kernels.threads is not None,
            log_level=ranks.log_level, log_format=ranks.log_format, device=ranks.device,
            visible=ranks.visible[number] if ranks.visible else None,
            gpu_memory_utilization=ranks.gpu_memory_utilization, has_budget=kv_cache_memory is not None,
            max_model_len=length, largest_step=largest,
        )
        for number, cores in enumerate(ranks.cores)
    ]  # fmt: skip
    tensors = _whole_tensors(checkpoint, choice.name)
    with contextlib.ExitStack() as undo:
        team = Team(setups[1:], on_lost, ranks.program)
        undo.callback(team.close)
        reduce = Reduce()
        with _on_cores(setups[0].cores):  # threads of the native kernels inherit the cores
            part = with_budget(load_part(setups[0], reduce))
        loaded = [part.loaded, *(_receive_loaded(team, rank, ranks.load_s) for rank in range(1, ranks.num_ranks))]
        part.check_held(tensors)
        _check_alike(loaded)
        if on_host:
            plan = plan_host(tensors, ranks.num_ranks, kv_cache_memory, block_size, length)
            pools = make_host_pools(team, tensors, plan, ranks.num_ranks, undo)
        else:
            free = [one.pool_bytes for one in loaded]
            devices = [one.device for one in loaded]
            plan = plan_devices(tensors, free, kv_cache_memory, block_size, length, devices)
            pools = make_device_pools(team, part.device, tensors, plan, ranks.num_ranks, undo)
            reduce.explain_by(team.explain)  # before a wait for the device, which waits for the other ranks
        way = SHARED if all(one.shares_memory for one in loaded) else collective.name
        _connect(team, part, way, collective.connect_s(os.environ))
        layout = PoolLayout(tensors, num_blocks=plan.num_blocks, block_size=block_size)
        info = describe(
            folder, part.network, name=None, max_model_len=max_model_len, dtype=choice.name, layout=layout,
            device=part.device.name,
        )  # fmt: skip
        own = part.make_model(dataclasses.replace(info, layout=pools[0].layout), pools[0])
        model = ShardedModel(
            own, pools, info=info, team=team, reduce=reduce, num_sums=part.num_sums, cores=setups[0].cores
        )  # fmt: skip
        team.serve()
        undo.pop_all()
    notes = (choice.reason, plan.describe(), kernels.note, *_describe(loaded, way), *part.notes)
    return LoadedRanks(model, tuple(note for note in notes if note))


def _whole_tensors(checkpoint: Checkpoint, dtype: str) -> tuple[KvTensor, ...]:
    tensors = rehearse(checkpoint, dtype)
    if tensors is None:
        raise ConfigError(
            f"{checkpoint.path}: the KV heads of a {checkpoint.config.model_type} are known only once it is loaded, so "
            "it cannot be cut for several ranks: use --tensor-parallel-size 1"
        )
    return tensors


@contextlib.contextmanager
def _on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Keep this thread on these cores for the block (empty: no change)."""
    before = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _check_alike(loaded: Sequence[RankLoaded]) -> None:
    """Check that all ranks sum alike: either all or none use native kernels. Raises ConfigError."""
    native = [rank for rank, one in enumerate(loaded) if one.is_native]
    if native and len(native) < len(loaded):
        raise ConfigError(f"only ranks {native} of {len(loaded)} run on native kernels: set PDSERVE_NATIVE=off")


def _receive_loaded(team: Team, rank: int, timeout_s: float) -> RankLoaded:
    return from_json(RankLoaded, team.receive(rank, RankMessageKind.LOADED, timeout_s).payload)


def _connect(team: Team, part: RankPart, way: str, connect_s: float) -> None:
    try:
        part.connect(way, team.connect(way), team.marks)
    except ReduceFailed as error:
        raise team.explain(str(error)) from error
    for rank in range(1, part.setup.of):
        team.receive(rank, RankMessageKind.READY, connect_s + _CONNECT_S)


def _describe(loaded: Sequence[RankLoaded], way: str) -> Iterator[str]:
    yield f"{len(loaded)} ranks add up {'in memory they share' if way == SHARED else f'by {way}'}"
    for rank, one in enumerate(loaded):
        held, read = one.weight_bytes / _MIB, one.bytes_read / _MIB
        place = f" on {one.device}" if one.device else ""
        yield (
            f"rank {rank} of {len(loaded)}{place}: {held:.1f} MiB of weights from {read:.1f} MiB read in "
            f"{one.seconds:.1f} s"
        )
        if one.kept != loaded[0].kept:
            yield f"rank {rank} of {len(loaded)}, unlike rank 0: {one.kept}"
