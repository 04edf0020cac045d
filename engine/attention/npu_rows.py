"""The rows of a step that one call computes, in the op's form: lists on the host, block tables on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from engine.attention.block_tables import DecodeInputs, Ints, counts, read_tables
from engine.step_metadata import StepMetadata
from engine.transfers import upload


@dataclass(frozen=True, slots=True)
class StepRows:
    """Some sequences of a step. `places` are their rows, None for all rows of the step, in its order."""

    places: torch.Tensor | None  # [num_rows] int64
    query_ends: list[int]  # cumulative, one per sequence
    kv_lengths: list[int]
    table: torch.Tensor  # [num_sequences, width] int32
    lengths: torch.Tensor  # kv_lengths on the device, [num_sequences] int64

    @property
    def is_one_chunk(self) -> bool:
        """Whether it is one sequence with several rows."""
        return len(self.query_ends) == 1 and self.query_ends[0] > 1

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Select these sequences' rows from the step's."""
        return rows if self.places is None else rows.index_select(0, self.places)

    def hidden(self, window: int, block_size: int) -> torch.Tensor:
        """Return which keys are outside the window of single rows: [num_sequences, 1, 1, width * block_size] bool."""
        positions = torch.arange(self.table.shape[1] * block_size, device=self.table.device)
        return (positions < (self.lengths - window)[:, None])[:, None, None]


class PlannedRows:
    """The rows of one step, grouped for the op's calls; a group is made on first use."""

    def __init__(self, metadata: StepMetadata) -> None:
        self._metadata = metadata
        self.block_size = metadata.block_size
        self.longest = max(metadata.packed.kv_lengths)
        self._counts = counts(metadata.packed)

    @property
    def num_sequences(self) -> int:
        """Sequences in the step."""
        return len(self._counts)

    @cached_property
    def everything(self) -> StepRows:
        """All sequences."""
        return self._group(np.arange(len(self._counts)))

    @cached_property
    def singles(self) -> StepRows | None:
        """The sequences with one row; None if there are none."""
        chosen = np.flatnonzero(self._counts == 1)
        return self._group(chosen) if len(chosen) else None

    @cached_property
    def each_chunk(self) -> Sequence[StepRows]:
        """The sequences with several rows, one by one."""
        return [self._group(np.array([index])) for index in np.flatnonzero(self._counts > 1)]

    def _group(self, chosen: Ints) -> StepRows:
        device, host = self._metadata.slots.device, read_tables(self._metadata.packed, self.block_size, chosen)
        ends = np.cumsum(self._counts)
        places = np.concatenate([np.arange(ends[i] - self._counts[i], ends[i]) for i in chosen])
        return StepRows(
            places=None if len(places) == ends[-1] else upload(torch.from_numpy(places), device),
            query_ends=np.cumsum(self._counts[chosen]).tolist(),
            kv_lengths=host.kv_lengths.tolist(),
            table=upload(torch.from_numpy(host.tables.astype(np.int32)), device),
            lengths=upload(torch.from_numpy(host.kv_lengths), device),
        )


class FixedRows:
    """The rows of a decode step over fixed inputs: one per sequence. Has the interface of PlannedRows."""

    each_chunk: Sequence[StepRows] = ()

    def __init__(self, inputs: DecodeInputs, kv_lengths: list[int]) -> None:
        """`kv_lengths` are those of this run; a replay takes new ones from the host."""
        self.block_size, self.num_sequences = inputs.block_size, len(kv_lengths)
        self.longest = inputs.tables.shape[1] * inputs.block_size  # in any replay
        self._inputs, self._kv_lengths = inputs, kv_lengths

    @cached_property
    def everything(self) -> StepRows:
        """All sequences."""
        inputs = self._inputs
        return StepRows(
            places=None, query_ends=list(range(1, self.num_sequences + 1)), kv_lengths=self._kv_lengths,
            table=inputs.tables.to(torch.int32), lengths=inputs.kv_lengths,
        )  # fmt: skip

    @property
    def singles(self) -> StepRows:
        """All sequences."""
        return self.everything
