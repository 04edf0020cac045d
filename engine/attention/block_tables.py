"""Block tables of a step: concatenated on the host, for libraries that plan there, or as rectangles.

A row is one sequence. In a rectangle, rows shorter than the widest repeat their own last block.
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.step_metadata import PackedStep

Ints = npt.NDArray[np.int64]


class TableUse(IntEnum):
    """How a replay of decode steps uses the block tables in DecodeInputs: for higher values they should be narrower."""

    NONE = 0
    READ = 1
    GATHER = 2


@dataclass(frozen=True)
class HostTables:
    """The blocks in use after the step, row after row, with each row's number of blocks and of tokens."""

    blocks: Ints  # [used.sum()]
    used: Ints  # [num_rows]
    kv_lengths: Ints  # [num_rows]

    @cached_property
    def tables(self) -> Ints:
        """Return the blocks as a rectangle no wider than needed, [num_rows, width]."""
        return self.rectangle(int(self.used.max(initial=0)))

    def rectangle(self, width: int) -> Ints:
        """Return the blocks as a rectangle, [num_rows, width]."""
        starts = np.cumsum(self.used) - self.used
        places = starts[:, None] + np.minimum(np.arange(width), self.used[:, None] - 1)
        return np.asarray(self.blocks[places], np.int64)

    def padded(self, num_rows: int, block: int, block_size: int) -> "HostTables":
        """Return `num_rows` rows.

        Each added row owns one slot, counted from the start of `block` on, and reads its slot's block up to that slot.
        """
        blocks, places = np.divmod(np.arange(num_rows - len(self.used)), block_size)
        return HostTables(
            np.concatenate([self.blocks, block + blocks]),
            np.concatenate([self.used, np.ones_like(blocks)]),
            np.concatenate([self.kv_lengths, 1 + places]),
        )


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Device inputs of a step with one token per sequence: all int64, one row per sequence."""

    block_size: int
    token_ids: torch.Tensor  # [num_rows]
    positions: torch.Tensor  # [num_rows]
    slots: torch.Tensor  # [num_rows]: where the row's own KV goes
    kv_lengths: torch.Tensor  # [num_rows]: with the row's own token
    tables: torch.Tensor  # [num_rows, width]


def read_tables(packed: PackedStep, block_size: int, chosen: Ints | None = None) -> HostTables:
    """Return the tables of the `chosen` sequences, or of all."""
    ends = _to_ints(packed.table_ends, np.int32)
    starts, kv_lengths = np.concatenate(([0], ends[:-1])), _to_ints(packed.kv_lengths, np.int32)
    if chosen is not None:
        starts, kv_lengths = starts[chosen], kv_lengths[chosen]
    used = -(-kv_lengths // block_size)
    blocks = _to_ints(packed.blocks, np.int32)
    if chosen is not None or len(blocks) > used.sum():  # drop blocks without KV yet and rows not chosen
        blocks = blocks[np.repeat(starts - (np.cumsum(used) - used), used) + np.arange(used.sum())]
    return HostTables(blocks, used, kv_lengths)


def counts(packed: PackedStep) -> Ints:
    """Return how many rows of the step each sequence has: [num_sequences]."""
    return np.diff(_to_ints(packed.query_ends, np.int32), prepend=0)


def _to_ints(values: Any, dtype: Any) -> Ints:
    return np.frombuffer(values, dtype).astype(np.int64)
