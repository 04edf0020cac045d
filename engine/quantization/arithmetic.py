"""Dequantise codes and scales to plain weights: one subtraction and one product in float32, then one rounding."""

from dataclasses import dataclass

import torch

from engine.checkpoints.weights import TensorSlice
from engine.quantization.interface import EvenGroups, Grouped, QuantisedModule

_STRIP_ELEMENTS = 1 << 18  # 1 MiB of float32, which stays in a core's cache


def dequantise(grouped: Grouped, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight [num_rows, num_columns] in `dtype`, on the device of its codes.

    Codes of at most 8 bits times a scale of float16 or bfloat16 are exact in float32, so only `dtype` rounds.
    """
    num_rows, num_columns = grouped.codes.shape
    result = torch.empty(num_rows, num_columns, dtype=dtype, device=grouped.codes.device)
    strip = max(1, _STRIP_ELEMENTS // max(1, num_columns))
    for start in range(0, num_rows, strip):
        rows = slice(start, start + strip)
        values = grouped.codes[rows].to(torch.float32, memory_format=torch.contiguous_format)
        scales = grouped.scales[rows].to(torch.float32)
        zeros = None if grouped.zeros is None else grouped.zeros[rows].to(torch.float32)
        _scale(values, scales, zeros, grouped.groups)
        result[rows] = values
    return result


@dataclass(frozen=True, slots=True)
class Matrix:
    """The plain weight of one quantised linear layer."""

    module: QuantisedModule

    @property
    def shape(self) -> tuple[int, ...]:
        """(outputs, inputs)."""
        return self.module.shape

    def dequantise(self, part: TensorSlice | None, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight, or a range of its rows or columns."""
        spans = [range(length) for length in self.module.shape]
        if part is not None:
            spans[part.dim] = range(part.start, part.end)
        return dequantise(self.module.read(spans[0], spans[1]), dtype)


def _scale(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, groups: EvenGroups | torch.Tensor
) -> None:
    """Subtract zeros and multiply by scales in place."""
    if isinstance(groups, torch.Tensor):
        if zeros is not None:
            values -= zeros.index_select(1, groups)
        values *= scales.index_select(1, groups)
        return
    for columns, taken in groups.runs(values.shape[1]):
        part = values[:, columns]
        part = part.view(len(part), taken.stop - taken.start, -1)  # [num_rows, num_groups, group_size]
        if zeros is not None:
            part -= zeros[:, taken, None]
        part *= scales[:, taken, None]
