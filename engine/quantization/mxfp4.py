"""MXFP4 experts as gpt-oss stores them: 4-bit floats, two per byte, with one power of two per 32 inputs.

    gate_up_proj_blocks [experts, outputs, groups, 16] uint8   gate_up_proj_scales [experts, outputs, groups] uint8
    down_proj_blocks, down_proj_scales                         likewise

A byte's low nibble comes first. A nibble is a sign, two bits of exponent and one of mantissa; a scale s means
2^(s - 127). The network's tensors are transposed: gate_up_proj and down_proj [experts, inputs, outputs].
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.checkpoints.weights import TensorSlice, Weights
from engine.quantization.arithmetic import dequantise
from engine.quantization.interface import EvenGroups, Grouped, QuantisedTensor
from wire.errors import ConfigError

_GROUP = 32
_BLOCKS, _SCALES = "_blocks", "_scales"
HALVES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice each nibble's value, so that all are whole."""
_BIAS = 127 + 1


@dataclass(frozen=True, slots=True)
class Mxfp4Layout:
    """The layout of an mxfp4 checkpoint; its config has no settings."""

    name: str = "mxfp4"
    rounds_inputs: bool = False
    rounded_inputs: torch.dtype | None = None
    has_static_inputs: bool = False
    adds_biases: bool = False
    companions: frozenset[str] = frozenset(
        name + kind for name in ("gate_up_proj", "down_proj") for kind in (_BLOCKS, _SCALES)
    )
    dropped: frozenset[str] = frozenset()

    def tensors(self, stored: Weights) -> Iterator[tuple[str, QuantisedTensor]]:
        """Yield each expert tensor that is stored in blocks."""
        for name in stored.names:
            if name.endswith(_BLOCKS):
                plain = name.removesuffix(_BLOCKS)
                yield plain, _experts(stored, plain)


@dataclass(frozen=True, slots=True)
class Experts:
    """One tensor for all experts of a layer."""

    stored: Weights
    name: str
    shape: tuple[int, int, int]

    def dequantise(self, part: TensorSlice | None, dtype: torch.dtype) -> torch.Tensor:
        """Return [experts, inputs, outputs], or a range of one dimension; a range of inputs reads whole groups."""
        blocks, scales, inside = self._read(part)
        made = torch.empty(len(blocks), len(inside), blocks.shape[1], dtype=dtype)
        for expert, block in enumerate(blocks):
            values = dequantise(_grouped(block, scales[expert]), dtype)
            made[expert] = values[:, inside.start : inside.stop].t()
        return made

    @property
    def modules(self) -> tuple["Expert", ...]:
        """Each expert's weight."""
        return tuple(Expert(self, number) for number in range(self.shape[0]))

    def _read(self, part: TensorSlice | None) -> tuple[torch.Tensor, torch.Tensor, range]:
        """Return blocks, scales, and the range of the requested inputs in them."""
        inside = range(self.shape[1])
        if part is not None and part.dim == 1:
            groups = range(part.start // _GROUP, -(-part.end // _GROUP))
            inside = range(part.start - groups.start * _GROUP, part.end - groups.start * _GROUP)
            part = TensorSlice(2, groups.start, groups.stop)
        elif part is not None and part.dim == 2:
            part = TensorSlice(1, part.start, part.end)
        read = self.stored.read
        return read(f"{self.name}{_BLOCKS}", part), read(f"{self.name}{_SCALES}", part), inside


@dataclass(frozen=True, slots=True)
class Expert:
    """Implements QuantisedModule: the weight of one expert in a tensor of all."""

    experts: Experts
    number: int

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        _, inputs, outputs = self.experts.shape
        return outputs, inputs

    def read(self, rows: range, columns: range) -> Grouped:
        """Read the whole expert and return the range of it, with scales in bfloat16, which represents them all."""
        part, name = TensorSlice(0, self.number, self.number + 1), self.experts.name
        groups = slice(columns.start // _GROUP, -(-columns.stop // _GROUP))
        blocks, scales = (
            self.experts.stored.read(f"{name}{kind}", part)[0, rows.start : rows.stop, groups]
            for kind in (_BLOCKS, _SCALES)
        )
        grouped, skipped = _grouped(blocks, scales), columns.start % _GROUP
        codes = grouped.codes[:, skipped : skipped + len(columns)]
        return Grouped(codes, grouped.scales.to(torch.bfloat16), None, EvenGroups(_GROUP, skipped))


def _grouped(blocks: torch.Tensor, scales: torch.Tensor) -> Grouped:
    """Return blocks [outputs, groups, 16] and exponents [outputs, groups] as int8 codes and powers of two."""
    halves = torch.tensor(HALVES, dtype=torch.int8)
    pairs = torch.stack((halves.repeat(16), halves.repeat_interleave(16)), dim=1)  # [256, 2], low nibble first
    exponents = scales.to(torch.int32) - _BIAS
    powers = torch.ldexp(torch.ones(exponents.shape), exponents)
    return Grouped(pairs[blocks.to(torch.int32)].flatten(1), powers, None, EvenGroups(_GROUP))


def _experts(stored: Weights, name: str) -> Experts:
    try:
        blocks, scales = stored.shape(f"{name}{_BLOCKS}"), stored.shape(f"{name}{_SCALES}")
    except KeyError as error:
        raise ConfigError(f"{name} has MXFP4 blocks but no {error.args[0]}") from error
    if len(blocks) != 4 or blocks[:3] != scales or blocks[3] != _GROUP // 2:
        raise ConfigError(f"{name}: blocks {blocks} and scales {scales} are not MXFP4 in groups of {_GROUP} inputs")
    return Experts(stored, name, (blocks[0], blocks[2] * _GROUP, blocks[1]))
