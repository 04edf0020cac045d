"""The interface of a quantised layout: its modules, their shapes, and any range of their codes and scales."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from engine.checkpoints.weights import TensorSlice, Weights


@dataclass(frozen=True, slots=True)
class EvenGroups:
    """Groups of `size` consecutive columns; the range starts `skipped` columns into the first group."""

    size: int
    skipped: int = 0

    def runs(self, num_columns: int) -> Iterator[tuple[slice, slice]]:
        """Yield columns and their groups: a partial first group, then all whole groups at once, then the rest."""
        start, group = 0, 0
        while start < num_columns:
            whole = 0 if start == 0 and self.skipped else (num_columns - start) // self.size
            head = self.size - (self.skipped if start == 0 else 0)
            end = start + (whole * self.size if whole else min(head, num_columns - start))
            yield slice(start, end), slice(group, group + max(whole, 1))
            start, group = end, group + max(whole, 1)


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """How a layer rounds its inputs where a calibration has chosen one step for all of them.

        rounded = input / step + zero, to the nearest whole number from -128 to 127
        output[r] = (codes[r] . rounded + bias[r]) * scales[r]

    `scales` are float32 [num_rows]; `bias` int32 [num_rows] holds the layer's bias and what `zero` adds to the sums; it
    is added once, so `bias` is None in a range of columns that does not start at the first.
    """

    step: float
    zero: int
    scales: torch.Tensor
    bias: torch.Tensor | None

    def to(self, device: torch.device) -> "StaticInputs":
        """Return a copy on `device`."""
        bias = None if self.bias is None else self.bias.to(device)
        return replace(self, scales=self.scales.to(device), bias=bias)


@dataclass(frozen=True, slots=True)
class Grouped:
    """A range of a quantised weight, before dequantisation.

        weight[r, c] = (codes[r, c] - zeros[r, group of c]) * scales[r, group of c]

    `codes` are small integers or float8 [num_rows, num_columns]; `scales` and `zeros` [num_rows, num_groups], zeros
    None where all are 0; `groups` maps columns to groups: as int64 [num_columns] with act order. Rows are outputs,
    columns inputs. `static`: the layer's own rounding of its inputs, None where it has none.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    groups: EvenGroups | torch.Tensor
    static: StaticInputs | None = None

    def to(self, device: torch.device) -> "Grouped":
        """Return a copy on `device`."""
        zeros, groups, static = self.zeros, self.groups, self.static
        return Grouped(
            self.codes.to(device), self.scales.to(device), None if zeros is None else zeros.to(device),
            groups.to(device) if isinstance(groups, torch.Tensor) else groups,
            None if static is None else static.to(device),
        )  # fmt: skip


class QuantisedModule(Protocol):
    """One linear layer whose weight is stored quantised."""

    @property
    def shape(self) -> tuple[int, int]:
        """Return (outputs, inputs)."""
        ...

    def read(self, rows: range, columns: range) -> Grouped:
        """Read the outputs `rows` and the inputs `columns`; at most one of the two ranges is partial."""
        ...


class QuantisedTensor(Protocol):
    """One plain tensor, computed from quantised ones."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return its shape in the network."""
        ...

    def dequantise(self, part: TensorSlice | None, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor, or a non-empty part of it, in `dtype`; reads no more than needed."""
        ...


class Layout(Protocol):
    """One way of storing quantised weights, as a checkpoint's config describes it."""

    @property
    def name(self) -> str:
        """Return the method and its bit width, such as `AWQ 4-bit`."""
        ...

    @property
    def rounds_inputs(self) -> bool:
        """Whether the checkpoint was made for layers that quantise their inputs too."""
        ...

    @property
    def rounded_inputs(self) -> torch.dtype | None:
        """The type, int8 or float8, of quantised inputs that are symmetric with dynamic scales; None for any others."""
        ...

    @property
    def has_static_inputs(self) -> bool:
        """Whether any layer rounds its inputs by a stored step (StaticInputs)."""
        ...

    @property
    def adds_biases(self) -> bool:
        """Whether its checkpoints may have biases for which the network has no place (engine/added_biases.py)."""
        ...

    def tensors(self, stored: Weights) -> Iterator[tuple[str, QuantisedTensor]]:
        """Yield plain tensors by name, detected by their stored parts. Raises ConfigError for shapes that disagree."""
        ...

    @property
    def companions(self) -> frozenset[str]:
        """Names of a quantised module's tensors that the loader must not see."""
        ...

    @property
    def dropped(self) -> frozenset[str]:
        """Names of tensors, in any module, that dequantised weights do not need."""
        ...


def read_region(stored: Weights, name: str, rows: range, columns: range) -> torch.Tensor:
    """Return [rows, columns] of the stored matrix `name`; if both are partial, the columns are cut after the read."""
    shape = stored.shape(name)
    if len(rows) < shape[0]:
        return stored.read(name, TensorSlice(0, rows.start, rows.stop))[:, columns.start : columns.stop]
    if len(columns) < shape[1]:
        return stored.read(name, TensorSlice(1, columns.start, columns.stop))
    return stored.read(name)
