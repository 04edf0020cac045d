"""Gather and scatter of one piece of a Runs to and from contiguous memory, with as few kernels as possible.

    rows of one size, one distance apart   one strided copy          neighbouring blocks, heads of one span
    other rows, aligned to 8 bytes         one indexed copy          a shuffled block table
    the rest                               one copy per row          does not occur in KV pools

Needs torch. Elements are 8 bytes wide wherever the addresses allow it.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from native.memory import Runs

_WIDE_BYTES = 8


class RowPlan(Protocol):
    """The rows of one piece. `memory` and `stage` are uint8, one-dimensional; the piece is at the start of `stage`."""

    @property
    def num_bytes(self) -> int:
        """Total size of the rows."""
        ...

    def gather(self, memory: torch.Tensor, base: int, stage: torch.Tensor) -> None:
        """Copy the rows, whose offsets count from `base`, one after another to the stage."""
        ...

    def scatter(self, stage: torch.Tensor, memory: torch.Tensor, base: int) -> None:
        """Copy the stage's bytes to the rows."""
        ...


def plan_rows(runs: Runs, align: int, piece_bytes: int, device: torch.device) -> Iterator[RowPlan]:
    """Yield a plan for each `piece_bytes` of the runs; the memory's address and every base are multiples of `align`."""
    for rows in _pieces(runs, piece_bytes):
        sizes, offsets = {num_bytes for _, num_bytes in rows}, [offset for offset, _ in rows]
        steps = {after - before for before, after in itertools.pairwise(offsets)}
        grain = math.gcd(align, *offsets, *sizes)
        if len(rows) == 1 or (len(sizes) == len(steps) == 1 and min(steps) >= min(sizes)):
            yield _Strided(offsets[0], rows[0][1], min(steps, default=rows[0][1]), len(rows), grain)
        elif grain % _WIDE_BYTES == 0:
            yield _Indexed.of(rows, grain, device)
        else:
            yield _OneByOne(tuple(_Strided(offset, size, size, 1, 1) for offset, size in rows))


@dataclass(frozen=True, slots=True)
class _Strided:
    """Rows of one size whose starts are `step` bytes apart. All numbers are multiples of `grain`."""

    offset: int
    row_bytes: int
    step: int
    rows: int
    grain: int

    @property
    def num_bytes(self) -> int:
        return self.row_bytes * self.rows

    def gather(self, memory: torch.Tensor, base: int, stage: torch.Tensor) -> None:
        """See RowPlan."""
        self._staged(stage).copy_(self._rows(memory, base))

    def scatter(self, stage: torch.Tensor, memory: torch.Tensor, base: int) -> None:
        """See RowPlan."""
        self._rows(memory, base).copy_(self._staged(stage))

    def _staged(self, stage: torch.Tensor) -> torch.Tensor:
        return _as_int64(stage[: self.num_bytes], self.grain).view(self.rows, -1)  # [rows, row elements]

    def _rows(self, memory: torch.Tensor, base: int) -> torch.Tensor:
        extent = self.step * (self.rows - 1) + self.row_bytes
        flat = _as_int64(memory.narrow(0, base + self.offset, extent), self.grain)  # [elements from first to last row]
        size = flat.element_size()
        return flat.as_strided((self.rows, self.row_bytes // size), (self.step // size, 1))  # [rows, row elements]


@dataclass(frozen=True, slots=True)
class _Indexed:
    """Rows made of grains of one size: `index` has the grains' numbers in order, [grains], counted from the base."""

    grain: int
    index: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int]], grain: int, device: torch.device) -> "_Indexed":
        numbers = [at for offset, size in rows for at in range(offset // grain, (offset + size) // grain)]
        return cls(grain, torch.tensor(numbers, dtype=torch.int64).to(device))  # [grains]

    @property
    def num_bytes(self) -> int:
        return self.grain * self.index.numel()

    def gather(self, memory: torch.Tensor, base: int, stage: torch.Tensor) -> None:
        """See RowPlan."""
        torch.index_select(self._grain_rows(memory, base), 0, self.index, out=self._staged(stage))

    def scatter(self, stage: torch.Tensor, memory: torch.Tensor, base: int) -> None:
        """See RowPlan."""
        self._grain_rows(memory, base).index_copy_(0, self.index, self._staged(stage))

    def _staged(self, stage: torch.Tensor) -> torch.Tensor:
        return self._grain_rows(stage[: self.num_bytes], 0)

    def _grain_rows(self, memory: torch.Tensor, base: int) -> torch.Tensor:
        whole = (memory.numel() - base) // self.grain * self.grain
        flat = _as_int64(memory.narrow(0, base, whole), self.grain)
        return flat.view(-1, self.grain // flat.element_size())  # [grains, elements of a grain]


@dataclass(frozen=True, slots=True)
class _OneByOne:
    """Rows without a common size and distance."""

    rows: tuple[_Strided, ...]

    @property
    def num_bytes(self) -> int:
        return sum(row.num_bytes for row in self.rows)

    def gather(self, memory: torch.Tensor, base: int, stage: torch.Tensor) -> None:
        """See RowPlan."""
        for row, part in self._stage_parts(stage):
            row.gather(memory, base, part)

    def scatter(self, stage: torch.Tensor, memory: torch.Tensor, base: int) -> None:
        """See RowPlan."""
        for row, part in self._stage_parts(stage):
            row.scatter(part, memory, base)

    def _stage_parts(self, stage: torch.Tensor) -> Iterator[tuple[_Strided, torch.Tensor]]:
        start = 0
        for row in self.rows:
            yield row, stage[start:]
            start += row.num_bytes


def _pieces(runs: Runs, piece_bytes: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the rows, (offset, bytes), split into pieces of `piece_bytes`; the last piece may be smaller."""
    piece: list[tuple[int, int]] = []
    room = piece_bytes
    for offset, num_bytes in runs.rows():
        while num_bytes:
            taken = min(num_bytes, room)
            piece.append((offset, taken))
            offset, num_bytes, room = offset + taken, num_bytes - taken, room - taken
            if not room:
                yield piece
                piece, room = [], piece_bytes
    if piece:
        yield piece


def _as_int64(flat: torch.Tensor, grain: int) -> torch.Tensor:
    return flat.view(torch.int64) if grain % _WIDE_BYTES == 0 else flat
