"""Fill a network's tensors from stored ones: only the parts that a rank owns, in the dtype that it uses."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from engine.checkpoints.tensor_sources import TensorSource
from engine.checkpoints.weights import TensorSlice, Weights

_SCRATCH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class DimensionRanges:
    """Ranges [start, end) of dimension `dim` of a whole tensor, concatenated.

    `is_zero`: the result has the whole shape and only zeros; the tensor is not read.
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]
    is_zero: bool = False

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the cut of a tensor with shape `whole`."""
        if self.is_zero:
            return whole
        return (*whole[: self.dim], sum(end - start for start, end in self.ranges), *whole[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class _Placement:
    """One stored tensor, or a part of it, and its destination in the new tensor."""

    name: str
    part: TensorSlice | None
    target: torch.Tensor


def cut_shape(source: TensorSource, weights: Weights, cut: DimensionRanges | None) -> tuple[int, ...]:
    """Return the shape of the tensor that `materialise` returns."""
    whole = source.shape(weights)
    return whole if cut is None else cut.shape(whole)


def materialise(
    source: TensorSource,
    weights: Weights,
    cut: DimensionRanges | None,
    dtype: torch.dtype,
    advance: Callable[[int], None],
) -> torch.Tensor:
    """Return the tensor; `advance(num_bytes)` is called for each piece, with its size in the dtype of `weights`."""
    if cut is None and not source.stacked and len(source.columns) == 1 and weights.dtype(source.columns[0][0]) == dtype:
        whole = weights.read(source.columns[0][0])
        advance(whole.nbytes)
        return whole
    if cut is not None and cut.is_zero:
        return torch.zeros(cut_shape(source, weights, cut), dtype=dtype)
    made = torch.empty(cut_shape(source, weights, cut), dtype=dtype)
    for placement in _placements(source, weights, cut, made):
        _fill(placement, weights, advance)
    return made


def _placements(
    source: TensorSource, weights: Weights, cut: DimensionRanges | None, made: torch.Tensor
) -> Iterator[_Placement]:
    """Yield the requested part of each column, placed one after another along the dimension."""
    dim = source.dim if cut is None else cut.dim
    if len(source.columns) > 1 and dim != source.dim:
        yield from _across(source, weights, cut, made)
        return
    ranges = None if cut is None else cut.ranges
    first, place = 0, 0
    for column, names in enumerate(source.columns):
        size = source.column_shape(weights, column)[dim] if source.column_shape(weights, column) else 1
        for start, end in ((first, first + size),) if ranges is None else ranges:
            start, end = max(start, first), min(end, first + size)
            if start < end:
                target = made.narrow(dim, place, end - start) if made.dim() else made
                whole = end - start == size
                yield from _into(source, names, dim, None if whole else (start - first, end - first), target)
                place += end - start
        first += size


def _across(
    source: TensorSource, weights: Weights, cut: DimensionRanges | None, made: torch.Tensor
) -> Iterator[_Placement]:
    """Yield columns that are concatenated along one dimension and cut along another."""
    assert cut is not None
    first = 0
    for column, names in enumerate(source.columns):
        size, place = source.column_shape(weights, column)[source.dim], 0
        target = made.narrow(source.dim, first, size)
        for start, end in cut.ranges:
            piece = target.narrow(cut.dim, place, end - start)
            yield from _into(source, names, cut.dim, (start, end), piece)
            place += end - start
        first += size


def _into(
    source: TensorSource, names: tuple[str, ...], dim: int, taken: tuple[int, int] | None, target: torch.Tensor
) -> Iterator[_Placement]:
    if not source.stacked:
        yield _Placement(names[0], None if taken is None else TensorSlice(dim, *taken), target)
    elif dim == 0:
        for row, name in enumerate(names if taken is None else names[slice(*taken)]):
            yield _Placement(name, None, target[row])
    else:
        for row, name in enumerate(names):
            yield _Placement(name, None if taken is None else TensorSlice(dim - 1, *taken), target[row])


def _fill(placement: _Placement, weights: Weights, advance: Callable[[int], None]) -> None:
    """Copy piece by piece, so that the extra buffer stays small."""
    name, part, target = placement.name, placement.part, placement.target
    row_bytes = target[:1].numel() * weights.dtype(name).itemsize if target.dim() else 1
    rows = max(1, _SCRATCH_BYTES // max(1, row_bytes))
    if target.dim() == 0 or target.shape[0] <= rows or (part is not None and part.dim != 0):
        piece = weights.read(name, part)
        target.copy_(piece)
        advance(piece.nbytes)
        return
    first = 0 if part is None else part.start
    for start in range(0, target.shape[0], rows):
        end = min(start + rows, target.shape[0])
        piece = weights.read(name, TensorSlice(0, first + start, first + end))
        target[start:end].copy_(piece)
        advance(piece.nbytes)
