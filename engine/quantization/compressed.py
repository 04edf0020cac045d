"""The compressed-tensors layout: int8, float8 and packed 4- and 8-bit weights, detected module by module.

    unpacked  weight int8 or float8_e4m3 [outputs, inputs]; weight_scale; weight_zero_point of the scale's shape
    packed    weight_packed int32 [outputs, inputs * b / 32], codes + 2^(b-1); weight_shape [2]; weight_scale
              [outputs, groups]; weight_zero_point int32 [outputs * b / 32, groups], zeros + 2^(b-1);
              weight_g_idx [inputs], the group of each input

Scales of inputs, outputs and of the KV cache are dropped: inputs stay floats, or are rounded token by token where a
device computes with the codes (docs/quantization.md).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.checkpoints.weights import Weights
from engine.quantization.arithmetic import Matrix
from engine.quantization.bits import WORD_BITS, covering, unpack
from engine.quantization.interface import EvenGroups, Grouped, QuantisedModule, QuantisedTensor, read_region
from engine.quantization.parts import WORDS, matrix_shape, part_shape, read_groups
from engine.quantization.scaled import (
    ScaleGrid,
    find_grid,
    groups_of,
    read_scales,
    scaled_module,
)
from wire.errors import ConfigError

PACKED_BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class CompressedLayout:
    """The compressed-tensors settings of config.json; `block` is the rectangle of one scale, if any.

    `group_sizes` are the inputs per scale of those config groups that quantise weights by groups.
    """

    name: str
    rounds_inputs: bool
    block: tuple[int, int] | None = None
    group_sizes: frozenset[int] = frozenset()
    rounded_inputs: torch.dtype | None = None
    has_static_inputs: bool = False
    adds_biases: bool = False
    companions: frozenset[str] = frozenset(
        {
            "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
            "input_scale", "input_zero_point", "output_scale", "output_zero_point",
        }
    )  # fmt: skip
    dropped: frozenset[str] = frozenset({"q_scale", "k_scale", "v_scale", "k_zero_point", "v_zero_point"})

    def tensors(self, stored: Weights) -> Iterator[tuple[str, QuantisedTensor]]:
        """Yield the weight of each module that has a weight_scale."""
        names = frozenset(stored.names)
        for name in stored.names:
            module, _, tensor = name.rpartition(".")
            if tensor == "weight_scale":
                read = self._packed if f"{module}.weight_packed" in names else self._scaled
                yield f"{module}.weight", Matrix(read(stored, module, names))

    def _scaled(self, stored: Weights, module: str, names: frozenset[str]) -> QuantisedModule:
        scale, zero = f"{module}.weight_scale", f"{module}.weight_zero_point"
        stored_zero = zero if zero in names else None
        return scaled_module(
            stored, module, scale=scale, zero=stored_zero, block=self.block, group_sizes=self.group_sizes
        )

    def _packed(self, stored: Weights, module: str, names: frozenset[str]) -> QuantisedModule:
        outputs, num_words = matrix_shape(stored, f"{module}.weight_packed", WORDS)
        if f"{module}.weight_shape" not in names:
            raise ConfigError(f"{module} has weight_packed without weight_shape")
        shape = tuple(int(length) for length in stored.read(f"{module}.weight_shape").flatten())
        inputs = shape[1] if len(shape) == 2 else 0
        bits = next((bits for bits in PACKED_BITS if -(-inputs * bits // WORD_BITS) == num_words), None)
        if shape[:1] != (outputs,) or inputs < 1 or bits is None:
            raise ConfigError(
                f"{module}.weight_packed {(outputs, num_words)} does not fit a weight {shape} of "
                f"{' or '.join(map(str, PACKED_BITS))} bits"
            )
        grid = find_grid(stored, f"{module}.weight_scale", (outputs, inputs), None, self.group_sizes)
        zeros, order = (f"{module}.{tensor}" in names for tensor in ("weight_zero_point", "weight_g_idx"))
        needed = (-(-outputs * bits // WORD_BITS), inputs // grid.columns_per_scale)
        if zeros and matrix_shape(stored, f"{module}.weight_zero_point", WORDS) != needed:
            found = stored.shape(f"{module}.weight_zero_point")
            raise ConfigError(f"{module}.weight_zero_point has shape {found}, not {needed}")
        if order and part_shape(stored, f"{module}.weight_g_idx") != (inputs,):
            raise ConfigError(f"{module}.weight_g_idx must have one group for each of {inputs} inputs")
        return PackedModule(stored, module, (outputs, inputs), bits, grid, has_zeros=zeros, ordered=order)


@dataclass(frozen=True, slots=True)
class PackedModule:
    """One layer of packed codes; `ordered` where weight_g_idx gives each input's group."""

    stored: Weights
    name: str
    shape: tuple[int, int]
    bits: int
    grid: ScaleGrid
    has_zeros: bool
    ordered: bool

    def read(self, rows: range, columns: range) -> Grouped:
        """Read the codes of this region and the scales of its groups; if `ordered`, the scales of all groups."""
        words, inside = covering(columns, self.bits)
        codes = unpack(read_region(self.stored, f"{self.name}.weight_packed", rows, words), self.bits)
        grouped = range(self.shape[1]) if self.ordered else columns
        scales = read_scales(self.stored, f"{self.name}.weight_scale", self.grid, rows, grouped)
        zeros = self._zeros(rows, self.grid.span(rows, grouped)[1], scales)
        return Grouped(codes[:, inside.start : inside.stop], scales, zeros, self._groups(columns))

    def _groups(self, columns: range) -> EvenGroups | torch.Tensor:
        if not self.ordered:
            return groups_of(self.grid, columns)
        num_groups = self.shape[1] // self.grid.columns_per_scale
        return read_groups(self.stored, f"{self.name}.weight_g_idx", columns, num_groups)

    def _zeros(self, rows: range, groups: range, scales: torch.Tensor) -> torch.Tensor:
        """Return zeros in units of the codes, where the middle 2^(b-1) represents 0."""
        if not self.has_zeros:
            return torch.full(scales.shape, 1 << (self.bits - 1), dtype=torch.uint8)
        words, inside = covering(rows, self.bits)
        packed = read_region(self.stored, f"{self.name}.weight_zero_point", words, groups).t().contiguous()
        return unpack(packed, self.bits)[:, inside.start : inside.stop].t()
