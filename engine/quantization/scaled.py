"""Weights stored as one int8 or float8 number per element, with scales per tensor, row, group or block.

weight [outputs, inputs], or of 4-bit codes [outputs / 2, inputs]: outputs 2 k and 2 k + 1 in the low and high half
scale [], [1], [outputs], [outputs, 1], [outputs, groups] or [row blocks, column blocks]
"""

from dataclasses import dataclass

import torch

from engine.checkpoints.weights import Weights
from engine.quantization.interface import EvenGroups, Grouped, read_region
from engine.quantization.parts import matrix_shape
from wire.errors import ConfigError

CODE_DTYPES = (torch.int8, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class ScaleGrid:
    """The division of a weight into rectangles with one scale each."""

    rows_per_scale: int
    columns_per_scale: int

    def span(self, rows: range, columns: range) -> tuple[range, range]:
        """Return the rows and columns of the scales that cover a range of the weight."""
        return (
            range(rows.start // self.rows_per_scale, -(-rows.stop // self.rows_per_scale)),
            range(columns.start // self.columns_per_scale, -(-columns.stop // self.columns_per_scale)),
        )


@dataclass(frozen=True, slots=True)
class ScaledModule:
    """One layer; `zero` names the tensor of zeros, None where there is none. `has_halves`: codes have 4 bits."""

    stored: Weights
    name: str
    shape: tuple[int, int]
    scale: str
    zero: str | None
    grid: ScaleGrid
    has_halves: bool = False

    def read(self, rows: range, columns: range) -> Grouped:
        """Read the codes of this range and the scales that cover them."""
        codes = self._codes(rows, columns)
        scales = read_scales(self.stored, self.scale, self.grid, rows, columns)
        zeros = None if self.zero is None else read_scales(self.stored, self.zero, self.grid, rows, columns)
        return Grouped(codes, scales, zeros, groups_of(self.grid, columns))

    def _codes(self, rows: range, columns: range) -> torch.Tensor:
        name = f"{self.name}.weight"
        if not self.has_halves:
            return read_region(self.stored, name, rows, columns)
        both = read_region(self.stored, name, range(rows.start // 2, -(-rows.stop // 2)), columns)
        codes = torch.stack((both << 4 >> 4, both >> 4), 1).flatten(0, 1)
        return codes[rows.start % 2 :][: len(rows)]


def scaled_module(
    stored: Weights,
    module: str,
    *,
    scale: str,
    zero: str | None,
    block: tuple[int, int] | None,
    group_sizes: frozenset[int] = frozenset(),
    has_halves: bool = False,
) -> ScaledModule:
    """Return the module, checked by its shapes and dtypes. Raises ConfigError."""
    shape = matrix_shape(stored, f"{module}.weight", (torch.int8,) if has_halves else CODE_DTYPES)
    shape = (shape[0] * 2, shape[1]) if has_halves else shape
    grid = find_grid(stored, scale, shape, block, group_sizes)
    if zero is not None and stored.shape(zero) != stored.shape(scale):
        raise ConfigError(f"{zero} has shape {stored.shape(zero)}, but its scale has {stored.shape(scale)}")
    return ScaledModule(stored, module, shape, scale, zero, grid, has_halves)


def find_grid(
    stored: Weights,
    scale: str,
    shape: tuple[int, int],
    block: tuple[int, int] | None,
    group_sizes: frozenset[int] = frozenset(),
) -> ScaleGrid:
    """Return the grid for the shape of the scale; `block` is the config's. Raises ConfigError if none fits.

    `group_sizes` are the config's: with a shorter last group, the shape alone would imply another group size.
    """
    outputs, inputs = shape
    found = stored.shape(scale)
    rows, columns = (*found, 1, 1)[:2] if len(found) < 3 else (0, 0)
    if block is not None and (rows, columns) == (-(-outputs // block[0]), -(-inputs // block[1])):
        return ScaleGrid(*block)
    if (rows, columns) == (1, 1):
        return ScaleGrid(outputs, inputs)
    if rows == outputs and columns > 0 and inputs % columns == 0:
        if columns > 1 and group_sizes and inputs // columns not in group_sizes:
            sizes = " or ".join(map(str, sorted(group_sizes)))
            raise ConfigError(
                f"{scale} divides {inputs} inputs into {columns} groups of {inputs // columns}, "
                f"but config.json says group_size {sizes}"
            )
        return ScaleGrid(1, inputs // columns)
    raise ConfigError(f"{scale} has shape {found}: not one scale per tensor, row or group of a weight {shape}")


def read_scales(stored: Weights, name: str, grid: ScaleGrid, rows: range, columns: range) -> torch.Tensor:
    """Return the scales of a range: one row for each of `rows`, one column for each group in `columns`."""
    row_span, column_span = grid.span(rows, columns)
    if len(stored.shape(name)) == 2:
        scales = read_region(stored, name, row_span, column_span)
    else:
        scales = stored.read(name).reshape(-1, 1)[row_span.start : row_span.stop]
    return scales[torch.arange(rows.start, rows.stop) // grid.rows_per_scale - row_span.start]


def groups_of(grid: ScaleGrid, columns: range) -> EvenGroups:
    """Return the mapping from inputs to the columns that `read_scales` returns."""
    return EvenGroups(grid.columns_per_scale, columns.start % grid.columns_per_scale)
