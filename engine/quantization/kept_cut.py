"""The part of a stored weight that one rank computes with, and its columns in groups of one size, as kernels need them.

cut              | read                                    | groups
column (outputs) | each range of rows, concatenated        | as stored
row (inputs)     | the range of columns                    | even: divided if a boundary of the cut is inside one
                 |                                         | act order: inputs are sorted by group, and padded if needed

With static inputs (interface.py, StaticInputs) each row has its own scale and bias; in a row cut only rank 0 adds the
bias.

Each layout reads any range of its words, scales, zeros and group indices itself (interface.py, QuantisedModule).
"""

from dataclasses import dataclass, replace
from math import gcd

import torch

from engine.checkpoints.materialise import DimensionRanges
from engine.quantization.interface import Grouped, QuantisedModule, StaticInputs

_PADDED_GROUP = 32
"""Inputs in a padded group: the smallest group that all kernels with groups accept; it divides the larger ones."""
_MAX_PADDING = 2
"""The most columns per input, padding included: with more, keeping the layer quantised saves little memory."""


def read_cut(module: QuantisedModule, cut: DimensionRanges | None) -> Grouped:
    """Read a module's weight, or a rank's cut of it; a cut of inputs has one range."""
    outputs, inputs = (range(length) for length in module.shape)
    if cut is None:
        return module.read(outputs, inputs)
    if cut.dim == 1:
        ((start, end),) = cut.ranges
        return module.read(outputs, range(start, end))
    parts = [module.read(range(start, end), inputs) for start, end in cut.ranges]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return replace(
        parts[0], codes=torch.cat([part.codes for part in parts]), scales=torch.cat([part.scales for part in parts]),
        zeros=torch.cat(zeros) if zeros else None,
        static=_stacked([part.static for part in parts if part.static is not None]),
    )  # fmt: skip


def _stacked(parts: list[StaticInputs]) -> StaticInputs | None:
    """Join ranges of rows of one layer; None if there are none."""
    if not parts:
        return None
    biases = [part.bias for part in parts if part.bias is not None]
    return replace(parts[0], scales=torch.cat([part.scales for part in parts]), bias=torch.cat(biases))


@dataclass(frozen=True, slots=True)
class EvenColumns:
    """The columns of a kept weight, in groups of `size`; `groups` [num_groups] has the stored group of each.

    `order` [num_columns] has the input of each column, None where they are in order. A column whose index is the number
    of inputs is padding: its input is 0.
    """

    size: int
    groups: torch.Tensor
    order: torch.Tensor | None = None

    def arranged(self, codes: torch.Tensor) -> torch.Tensor:
        """Return codes [outputs, inputs] in the order of the columns, padded."""
        if self.order is None:
            return codes.contiguous()
        if len(self.order) > codes.shape[1]:
            codes = torch.nn.functional.pad(codes, (0, 1))
        return codes[:, self.order]


def even_columns(grouped: Grouped) -> EvenColumns | str:
    """Return the columns of a weight, or the reason why they cannot be in even groups."""
    groups, inputs = grouped.groups, grouped.codes.shape[1]
    if isinstance(groups, torch.Tensor):
        return _sorted(groups)
    size = inputs if groups.skipped + inputs <= groups.size else gcd(groups.size, groups.skipped, inputs)
    firsts = torch.arange(0, inputs, size, device=grouped.scales.device)
    return EvenColumns(size, (firsts + groups.skipped) // groups.size)


def _sorted(groups: torch.Tensor) -> EvenColumns | str:
    """Sort the inputs by group, and pad the groups where they have no common size that kernels accept."""
    inputs = len(groups)
    held, counts = torch.unique(groups, return_counts=True)
    size = gcd(*counts.tolist())
    if len(held) * size < inputs and size % _PADDED_GROUP:
        size = _PADDED_GROUP
    padded = (counts + size - 1) // size * size
    total = int(padded.sum())
    if total > _MAX_PADDING * inputs:
        return f"act order leaves {inputs} inputs in {len(held)} groups of different sizes"
    shift = (padded - counts).cumsum(0) - (padded - counts)  # the padding before each group
    order = torch.full((total,), inputs, device=groups.device)
    columns = torch.arange(inputs, device=groups.device) + shift.repeat_interleave(counts)
    order[columns] = torch.argsort(groups, stable=True)
    return EvenColumns(size, held.repeat_interleave(padded // size), order)
