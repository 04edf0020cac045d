"""Plan and make the pools of all ranks.

host memory: rank 0 makes all of them, and each other rank maps its own before it is sealed (docs/adr/0008)
a device:    each rank makes its own, with as many blocks as fit on the fullest of the devices (docs/adr/0015)
"""

import contextlib
import dataclasses
from collections.abc import Sequence

from devices.host_memory import available_bytes
from devices.host_pool import HostPool
from devices.interface import Device, Memory
from engine.decode_graphs import num_spare_blocks
from engine.memory_plan import MemoryPlan, cpu_budget, least_blocks, least_bytes, plan_pool
from engine.ranks.message_kinds import RankMessageKind
from engine.ranks.rank_pool import RankPool
from engine.ranks.setup import PoolSetup
from engine.ranks.team import Team
from processes.rank_payloads import to_json
from wire.errors import ConfigError
from wire.kv_layout import KvTensor, PoolLayout, Rank

_MAP_S = 60.0


def plan_host(
    tensors: tuple[KvTensor, ...], num_ranks: int, requested_bytes: int | None, block_size: int, length: int
) -> MemoryPlan:  # fmt: skip
    """Return the plan of all pools together: repeated heads count once for each rank that stores them."""
    return _plan_all(tensors, num_ranks, cpu_budget(requested_bytes, available_bytes()), block_size, length)


def plan_devices(
    tensors: tuple[KvTensor, ...], free: Sequence[int], requested_bytes: int | None, block_size: int, length: int,
    devices: Sequence[str] = (), spare_blocks: int = 0,
) -> MemoryPlan:  # fmt: skip
    """Return the plan of all pools together, where rank i has `free[i]` bytes; all have as many blocks as the smallest.

    `requested_bytes` are for all pools together, as on the host; `devices` describe, for messages, each rank's device
    and the memory left for steps. Each pool has `spare_blocks` for padding rows of graphs, which are not part of the
    plan. Raises ConfigError if the pools do not fit.
    """
    if requested_bytes is not None:
        plan = _plan_all(tensors, len(free), requested_bytes, block_size, length, spare_blocks)
        for layout, bytes_free in zip(_rank_layouts(tensors, plan, len(free), spare_blocks), free, strict=True):
            if layout.total_bytes > bytes_free:
                raise ConfigError(
                    f"--kv-cache-memory {requested_bytes} bytes: {layout.total_bytes} of them are for {layout.rank}, "
                    f"whose device has {bytes_free} free"
                )
        return plan
    plans = []
    for number, budget in enumerate(free):
        held = _rank_tensors(tensors, Rank(number, len(free)))
        if budget < (least := least_bytes(held, block_size, length, spare_blocks)):
            rank = f"{Rank(number, len(free))}{f' ({devices[number]})' if devices else ''}"
            least_of_all = least_bytes(_held_by_all(tensors, len(free)), block_size, length, spare_blocks)
            graphs = f", and graphs {spare_blocks} more" if spare_blocks else ""
            needed = least_blocks(block_size, length)
            raise ConfigError(
                f"{rank} has {budget} bytes for its KV pool, but needs {least} (a sequence takes {needed} "
                f"block{'s' * (needed != 1)} of {block_size} tokens{graphs}): raise --gpu-memory-utilization, or lower "
                "--max-num-seqs or --prefill-chunk-size, which reduces the memory of steps; or set --kv-cache-memory, "
                f"for all {len(free)} ranks together, to {least_of_all} or more"
            )
        plans.append(
            plan_pool(
                held, budget_bytes=budget, block_size=block_size, max_model_len=length, spare_blocks=spare_blocks
            )
        )  # fmt: skip
    num_blocks = min(plan.num_blocks for plan in plans)
    kv_bytes = sum(num_blocks * (plan.kv_bytes // plan.num_blocks) for plan in plans)
    return dataclasses.replace(plans[0], num_blocks=num_blocks, kv_bytes=kv_bytes)


def make_host_pools(
    team: Team, tensors: tuple[KvTensor, ...], plan: MemoryPlan, num_ranks: int, undo: contextlib.ExitStack
) -> list[Memory]:  # fmt: skip
    """Make the pools of all ranks here; each other rank maps its pool before it is sealed. `undo` closes them."""
    message = to_json(PoolSetup(tensors, plan.num_blocks))

    def share_with(rank: int, fd: int) -> None:
        team.send(rank, RankMessageKind.POOL, message, (fd,))
        team.receive(rank, RankMessageKind.MAPPED, _MAP_S)

    pools: list[Memory] = []
    for number, layout in enumerate(_rank_layouts(tensors, plan, num_ranks)):
        share = None if number == 0 else (lambda fd, rank=number: share_with(rank, fd))
        pools.append(HostPool(layout, share))
        undo.callback(pools[-1].close)
    return pools


def make_device_pools(
    team: Team, device: Device, tensors: tuple[KvTensor, ...], plan: MemoryPlan, num_ranks: int, graph_rows: int,
    undo: contextlib.ExitStack,
) -> list[Memory]:  # fmt: skip
    """Make rank 0's pool on `device` while each other rank makes its own on its device. `undo` closes rank 0's."""
    team.send_all(RankMessageKind.POOL, to_json(PoolSetup(tensors, plan.num_blocks, graph_rows)))
    first, *others = _rank_layouts(tensors, plan, num_ranks, num_spare_blocks(graph_rows, plan.block_size))
    own = device.make_pool(first)
    undo.callback(own.close)
    for layout in others:
        team.receive(layout.rank.number, RankMessageKind.MAPPED, _MAP_S)
    return [own, *(RankPool(team, layout) for layout in others)]


def _plan_all(
    tensors: tuple[KvTensor, ...], num_ranks: int, budget: int, block_size: int, length: int, spare_blocks: int = 0
) -> MemoryPlan:  # fmt: skip
    held = _held_by_all(tensors, num_ranks)
    return plan_pool(
        held, budget_bytes=budget, block_size=block_size, max_model_len=length, spare_blocks=spare_blocks
    )  # fmt: skip


def _rank_tensors(tensors: tuple[KvTensor, ...], rank: Rank) -> tuple[KvTensor, ...]:
    return tuple(PoolLayout(tensors, num_blocks=1, block_size=1, rank=rank).tensors)


def _held_by_all(tensors: tuple[KvTensor, ...], num_ranks: int) -> list[KvTensor]:
    return [tensor for number in range(num_ranks) for tensor in _rank_tensors(tensors, Rank(number, num_ranks))]


def _rank_layouts(
    tensors: tuple[KvTensor, ...], plan: MemoryPlan, num_ranks: int, spare_blocks: int = 0
) -> list[PoolLayout]:  # fmt: skip
    num_blocks = plan.num_blocks + spare_blocks
    return [
        PoolLayout(tensors, num_blocks=num_blocks, block_size=plan.block_size, rank=Rank(number, num_ranks))
        for number in range(num_ranks)
    ]
