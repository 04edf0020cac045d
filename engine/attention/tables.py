"""Block tables of a step as rectangles: on the host for libraries that plan there, on the device for what reads them.

A row is one sequence. Rows that are shorter than the widest repeat their last block, which is theirs.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.step_metadata import PackedStep

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HostTables:
    """Blocks that hold KV after the step, [num_rows, width], and the tokens in them, [num_rows]."""

    tables: Ints
    kv_lengths: Ints

    def num_used(self, block_size: int) -> Ints:
        """Return how many blocks of each row hold KV: [num_rows]."""
        return -(-self.kv_lengths // block_size)


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """What a step of one token a sequence reads, on the device: all int64, with one row a sequence."""

    block_size: int
    token_ids: torch.Tensor  # [num_rows]
    positions: torch.Tensor  # [num_rows]
    slots: torch.Tensor  # [num_rows]: where the row's own KV goes
    kv_lengths: torch.Tensor  # [num_rows]: with the row's own token
    tables: torch.Tensor  # [num_rows, width]


def read_tables(packed: PackedStep, block_size: int, chosen: Ints | None = None) -> HostTables:
    """Return the tables of the `chosen` sequences, of all by default."""
    ends = _ints(packed.table_ends, np.int32)
    starts, kv_lengths = np.concatenate(([0], ends[:-1])), _ints(packed.kv_lengths, np.int32)
    if chosen is not None:
        starts, kv_lengths = starts[chosen], kv_lengths[chosen]
    used = -(-kv_lengths // block_size)
    places = np.minimum(np.arange(used.max(initial=0)), used[:, None] - 1)
    return HostTables(_ints(packed.blocks, np.int32)[starts[:, None] + places], kv_lengths)


def counts(packed: PackedStep) -> Ints:
    """Return how many rows of the step each sequence has: [num_sequences]."""
    return np.diff(_ints(packed.query_ends, np.int32), prepend=0)


def _ints(values: Any, dtype: Any) -> Ints:
    return np.frombuffer(values, dtype).astype(np.int64)
