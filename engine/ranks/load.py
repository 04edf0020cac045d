"""Load a model folder into a ShardedModel: all ranks load their slices at the same time, then the pools are made.

rank 0: check -> start the others -> load own part -> LOADED -> pools, MAPPED -> CONNECT, READY -> CAPTURE each -> serve
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from devices.interface import Memory
from devices.table import AUTO, open_device, traits_of
from engine.attention.backends import make_backend
from engine.checkpoints.checkpoint import Checkpoint, model_length
from engine.checkpoints.dtypes import DtypeChoice, choose_dtype, read_cpu_flags
from engine.decode_graphs import num_spare_blocks
from engine.device_modules import give_back
from engine.fused.fuse import will_fuse
from engine.fused.kernels import NO_KERNELS, Kernels, find_kernels
from engine.headroom import LargestStep
from engine.kv_probe import rehearse
from engine.memory_plan import MemoryPlan
from engine.model_folder import ModelFolder, describe, open_folder
from engine.network import build_network
from engine.ranks.budget import with_budget
from engine.ranks.message_kinds import RankMessageKind
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

    `cores` has the cores of each rank's device (empty: all of this process's), `device` is the kind of the devices and
    `visible` the value of the kind's variable for each rank (empty: unchanged). `gpu_memory_utilization`: the share of
    a device's memory that its rank takes, including its `largest_step`. Steps of up to `max_graph_rows` sequences are
    replayed from graphs, where the devices and the model allow it. The other ranks' processes run the module `program`.
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
    max_graph_rows: int = 0
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


@dataclass(frozen=True, slots=True)
class _CheckedModel:
    """A model folder that can be split over the ranks: what is known before a weight is read."""

    folder: ModelFolder
    dtype: DtypeChoice
    length: int
    kernels: Kernels
    tensors: tuple[KvTensor, ...]


def load_ranks(
    path: Path, *, dtype: str, block_size: int, kv_cache_memory: int | None, ranks: RanksOptions, on_lost: OnLost,
    attention_backend: str = AUTO, max_model_len: int | None = None, quantization: str | None = None,
    on_capture: Callable[[], None] = lambda: None,
) -> LoadedRanks:  # fmt: skip
    """Load the checkpoint for several ranks; see load_model. `on_lost` is called once when one of them is lost.

    Raises ConfigError, before weights are read, if the model cannot be cut, and InstanceLost if a rank ends meanwhile.
    """
    collective = collective_for_ranks(ranks.device)
    make_backend(attention_backend, open_device(ranks.device))
    checked = _check(path, dtype, ranks, max_model_len, quantization)
    setups = _rank_setups(
        checked, path, ranks, block_size=block_size, attention_backend=attention_backend, quantization=quantization,
        has_budget=kv_cache_memory is not None,
    )  # fmt: skip
    with contextlib.ExitStack() as undo:
        team, reduce = Team(setups[1:], on_lost, ranks.program), Reduce()
        undo.callback(team.close)
        part, loaded = _load_parts(team, setups[0], reduce, ranks, checked.tensors)
        graph_rows = min(one.graph_rows for one in loaded)
        plan = _plan(checked, part, loaded, kv_cache_memory, num_spare_blocks(graph_rows, block_size))
        pools = _make_pools(team, part, checked.tensors, plan, graph_rows, undo)
        reduce.explain_by(team.explain)  # before a wait for the device, which waits for the other ranks
        way = SHARED if all(one.shares_memory for one in loaded) else collective.name
        _connect(team, part, way, collective.connect_s(os.environ))
        layout = PoolLayout(checked.tensors, num_blocks=plan.num_blocks, block_size=block_size)
        info = describe(
            checked.folder, part.network, name=None, max_model_len=max_model_len, dtype=checked.dtype.name,
            layout=layout, device=part.device.name,
        )  # fmt: skip
        held = PoolLayout(checked.tensors, num_blocks=plan.num_blocks, block_size=block_size, rank=setups[0].rank)
        own = part.make_model(dataclasses.replace(info, layout=held), pools[0], graph_rows)
        model = ShardedModel(own, pools, info=info, team=team, reduce=reduce, cores=setups[0].cores)
        team.serve()  # before the capture: a device that waits for a lost rank may never return
        if graph_rows:
            on_capture()
            model.capture_graphs()
            give_back(part.device)
        undo.pop_all()
    notes = (checked.dtype.reason, plan.describe(), checked.kernels.note, *_describe(loaded, way), *part.notes)
    return LoadedRanks(model, tuple(note for note in notes if note))


def _check(
    path: Path, dtype: str, ranks: RanksOptions, max_model_len: int | None, quantization: str | None
) -> _CheckedModel:  # fmt: skip
    """Open the folder. Raises ConfigError if the model cannot be split over these ranks."""
    on_host = traits_of(ranks.device).pools_on_host
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
    return _CheckedModel(folder, choice, length, kernels, _whole_tensors(checkpoint, choice.name))


def _rank_setups(
    checked: _CheckedModel, path: Path, ranks: RanksOptions, *, block_size: int, attention_backend: str,
    quantization: str | None, has_budget: bool,
) -> list[RankSetup]:  # fmt: skip
    largest = None if ranks.largest_step is None else dataclasses.astuple(ranks.largest_step)
    return [
        RankSetup(
            path=str(path), dtype=checked.dtype.name, number=number, of=ranks.num_ranks, block_size=block_size,
            attention_backend=attention_backend, quantization=quantization, cores=cores,
            num_threads=ranks.num_threads, step_s=ranks.step_s, is_native=checked.kernels.threads is not None,
            log_level=ranks.log_level, log_format=ranks.log_format, device=ranks.device,
            visible=ranks.visible[number] if ranks.visible else None,
            gpu_memory_utilization=ranks.gpu_memory_utilization, has_budget=has_budget,
            max_model_len=checked.length, largest_step=largest, max_graph_rows=ranks.max_graph_rows,
        )
        for number, cores in enumerate(ranks.cores)
    ]  # fmt: skip


def _load_parts(
    team: Team, own: RankSetup, reduce: Reduce, ranks: RanksOptions, tensors: tuple[KvTensor, ...]
) -> tuple[RankPart, list[RankLoaded]]:  # fmt: skip
    """Load rank 0's part while the others load theirs; return rank 0's part, and the reports of all ranks."""
    with _on_cores(own.cores):  # threads of the native kernels inherit the cores
        part = with_budget(load_part(own, reduce))
    loaded = [part.loaded, *(_receive_loaded(team, rank, ranks.load_s) for rank in range(1, ranks.num_ranks))]
    part.check_held(tensors)
    _check_alike(loaded)
    return part, loaded


def _plan(
    checked: _CheckedModel, part: RankPart, loaded: Sequence[RankLoaded], requested_bytes: int | None, spare_blocks: int
) -> MemoryPlan:  # fmt: skip
    block_size, num_ranks = part.setup.block_size, part.setup.of
    if part.device.traits.pools_on_host:
        return plan_host(checked.tensors, num_ranks, requested_bytes, block_size, checked.length)
    free, devices = [one.pool_bytes for one in loaded], [one.device for one in loaded]
    return plan_devices(
        checked.tensors, free, requested_bytes, block_size, checked.length, devices, spare_blocks
    )  # fmt: skip


def _make_pools(
    team: Team, part: RankPart, tensors: tuple[KvTensor, ...], plan: MemoryPlan, graph_rows: int,
    undo: contextlib.ExitStack,
) -> list[Memory]:  # fmt: skip
    if part.device.traits.pools_on_host:
        return make_host_pools(team, tensors, plan, part.setup.of, undo)
    return make_device_pools(team, part.device, tensors, plan, part.setup.of, graph_rows, undo)


def _whole_tensors(checkpoint: Checkpoint, dtype: str) -> tuple[KvTensor, ...]:
    tensors = rehearse(checkpoint, dtype)
    if tensors is None:
        raise ConfigError(
            f"{checkpoint.path}: the KV heads of a {checkpoint.config.model_type} are known only once it is loaded, so "
            "it cannot be split over several ranks: use --tensor-parallel-size 1"
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
    yield f"{len(loaded)} ranks all-reduce {'in shared memory' if way == SHARED else f'over {way}'}"
    for rank, one in enumerate(loaded):
        held, read = one.weight_bytes / _MIB, one.bytes_read / _MIB
        place = f" on {one.device}" if one.device else ""
        yield (
            f"rank {rank} of {len(loaded)}{place}: {held:.1f} MiB of weights from {read:.1f} MiB read in "
            f"{one.seconds:.1f} s"
        )
        if one.kept != loaded[0].kept:
            yield f"rank {rank} of {len(loaded)}, unlike rank 0: {one.kept}"
