"""float8 weights with one scale per block of 128 x 128, as in DeepSeek and Qwen models.

float8-blocks   by torch's scaled_mm, with inputs rounded to float8 and one scale per 128 neighbouring values of a token
widened         without scaled_mm: a few rows of blocks at a time are widened to the rows' dtype

scaled_mm's scales (_check_scaled_mm_sizes_v2 in torch/_meta_registrations.py; _scaled_block1x128_block128x128 in
ATen/native/cuda/ScaledBlas.cpp, which runs on compute capability 9.x with cuBLASLt 12.9 and later):

    inputs    float32 [num_rows, inputs / 128], of strides (1, num_rows)
    weight    float32 [inputs / 128 rounded up to a multiple of 4, outputs / 128], of strides (1, its first size)
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.quantization.compact import CompactWeights, compact_linear
from engine.quantization.kept import KeptWeight, Kernel
from engine.quantization.kept_rounded import round_by_token

BLOCK = 128
_FLOAT8 = torch.float8_e4m3fn
_ROWS = 16
"""Rows are padded to a multiple of this: the scales of 128 inputs each then begin at a multiple of 64 bytes."""


@dataclass(frozen=True, slots=True)
class BlockKernel:
    """Implements Kernel. `codes` [outputs, inputs], `scales` as above."""

    codes: torch.Tensor
    scales: torch.Tensor
    multiply: Callable[..., torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """See Kernel."""
        return self.codes.nbytes + self.scales.nbytes

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """See Kernel."""
        padded = functional.pad(rows, (0, 0, 0, -len(rows) % _ROWS))
        rounded, steps = round_by_token(padded.reshape(-1, BLOCK), _FLOAT8)
        steps = steps.view(len(padded), -1).t().clone(memory_format=torch.contiguous_format).t()
        recipes = functional.ScalingType
        made = self.multiply(
            rounded.view(padded.shape), self.codes.t(), steps, recipes.BlockWise1x128, self.scales,
            recipes.BlockWise128x128, output_dtype=rows.dtype if rows.dtype == torch.bfloat16 else torch.float32,
        )  # fmt: skip
        return made.narrow(0, 0, len(rows)).to(rows.dtype)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Implements KeptFormat by `multiply`, torch's scaled_mm."""

    multiply: Callable[..., torch.Tensor]

    @property
    def rounds_inputs(self) -> bool:
        """See KeptFormat."""
        return True

    def handles(self, weight: KeptWeight) -> bool:
        """See KeptFormat: a checkpoint whose inputs are rounded to float8, with several scales per output."""
        return _has_blocks(weight) and weight.rounded_inputs == _FLOAT8

    def lacking(self, weight: KeptWeight, dtype: torch.dtype) -> str | None:
        """See KeptFormat."""
        outputs, inputs = weight.shape
        rows = weight.scales.reshape(-1, BLOCK, weight.scales.shape[1]) if outputs % BLOCK == 0 else None
        if rows is None or inputs % BLOCK or weight.group_size != BLOCK or bool((rows != rows[:, :1]).any()):
            return f"scaled_mm supports whole blocks of {BLOCK} x {BLOCK}, which do not divide {outputs} x {inputs}"
        return None

    def pack(self, weight: KeptWeight, dtype: torch.dtype) -> Kernel:
        """See KeptFormat."""
        blocks = weight.scales[::BLOCK].float()  # [outputs / 128, inputs / 128]
        scales = blocks.new_zeros(len(blocks), -(-blocks.shape[1] // 4) * 4)
        scales[:, : blocks.shape[1]] = blocks
        return BlockKernel(weight.codes, scales.t(), self.multiply)

    def deviation(self, weight: KeptWeight, rows: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
        """See KeptFormat. Weights are exact; an input is off by at most half a unit in the last place."""
        return norms * (torch.finfo(_FLOAT8).eps / 2)


@dataclass(frozen=True, slots=True)
class WidenedLinear:
    """Implements Kernel. Each of `weights` is a block of outputs that share their scales."""

    weights: CompactWeights

    @property
    def num_bytes(self) -> int:
        """See Kernel."""
        return self.weights.num_bytes

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """See Kernel."""
        num_blocks, at_once = self.weights.shape[0], self.weights.in_scratch(rows.dtype)
        return torch.cat([
            functional.linear(rows, self.weights.widened(slice(first, first + at_once), rows.dtype).flatten(0, 1))
            for first in range(0, num_blocks, at_once)
        ], dim=1)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WidenedFormat:
    """Implements KeptFormat."""

    @property
    def rounds_inputs(self) -> bool:
        """See KeptFormat."""
        return False

    def handles(self, weight: KeptWeight) -> bool:
        """See KeptFormat."""
        return _has_blocks(weight)

    def lacking(self, weight: KeptWeight, dtype: torch.dtype) -> str | None:
        """See KeptFormat."""
        return None

    def pack(self, weight: KeptWeight, dtype: torch.dtype) -> Kernel:
        """See KeptFormat."""
        return WidenedLinear(compact_linear(weight))

    def deviation(self, weight: KeptWeight, rows: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
        """See KeptFormat. Each weight is rounded once."""
        return norms * (torch.finfo(rows.dtype).eps / 2)


def _has_blocks(weight: KeptWeight) -> bool:
    return weight.codes.dtype == _FLOAT8 and weight.scales.shape[1] > 1


BLOCKS_BY_TORCH = BlockFormat(functional.scaled_mm)
