"""Measure a rank's memory for its pool: its device's free memory after the weights, less that of its largest step."""

import dataclasses

from engine.attention.interface import GraphBackend
from engine.headroom import Headroom, LargestStep, measure_headroom, num_blocks
from engine.memory_plan import device_budget
from engine.ranks.rank_part import RankPart, part_info
from wire.kv_layout import PoolLayout


def with_budget(part: RankPart) -> RankPart:
    """Return the part with its pool's budget in bytes; unchanged where rank 0 makes all pools.

    Call it before the ranks are connected: the measured step runs on this rank alone. Raises ConfigError.
    """
    setup, device = part.setup, part.device
    if device.traits.pools_on_host:
        return part
    headroom = Headroom()
    if setup.has_budget:
        pool_bytes = device.memory().free
    else:
        if setup.largest_step is not None:
            headroom = _measured(part, LargestStep(*setup.largest_step))
        now = device.memory()
        pool_bytes = device_budget(None, setup.gpu_memory_utilization, now.total, now.free, headroom.total_bytes)
    description = ", ".join(filter(None, (device.describe(), headroom.describe())))
    return dataclasses.replace(part, loaded=dataclasses.replace(part.loaded, pool_bytes=pool_bytes, device=description))


def _measured(part: RankPart, largest: LargestStep) -> Headroom:
    """Run this rank's part of the largest steps on the smallest pool that fits them, then free that pool."""
    rows = part.loaded.graph_rows
    layout = _layout(part, num_blocks(part_info(part, _layout(part, 1)), largest, rows))
    return measure_headroom(
        lambda: part.make_model(part_info(part, layout), part.device.make_pool(layout)), part.device, largest,
        graph_rows=rows, graphs=part.backend if isinstance(part.backend, GraphBackend) else None,
    )  # fmt: skip


def _layout(part: RankPart, blocks: int) -> PoolLayout:
    return PoolLayout(part.loaded.tensors, num_blocks=blocks, block_size=part.setup.block_size)
