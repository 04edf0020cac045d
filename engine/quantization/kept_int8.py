"""int8 weights with one scale per output, times inputs rounded to int8 token by token (W8A8), by the device's op.

output[t, n] = (inputs[t] . codes[n]) * step[t] * scale[n], the sum exact in int32; step[t] = max |input[t]| / 127
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.quantization.kept import KeptWeight, Kernel

LARGEST = 127
_LEAST_ROWS = 32  # CUDA's op needs more than 16
_MULTIPLE = 8  # of inputs and of outputs, for the same op


@dataclass(frozen=True, slots=True)
class Int8Op:
    """A device's int8 multiplication.

    `multiply` returns [num_rows, outputs] of rows [num_rows, inputs], codes and scales, in the rows' dtype. `lay_out`
    arranges int8 codes [outputs, inputs] for it. `beyond` describes an unsupported shape or dtype, None if supported.
    """

    multiply: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    lay_out: Callable[[torch.Tensor], torch.Tensor]
    beyond: Callable[[KeptWeight, torch.dtype], str | None]


@dataclass(frozen=True, slots=True)
class Int8Kernel:
    """Implements Kernel. `codes` int8 in the op's layout, `scales` float32 [outputs]."""

    codes: torch.Tensor
    scales: torch.Tensor
    op: Int8Op

    @property
    def num_bytes(self) -> int:
        """See Kernel."""
        return self.codes.nbytes + self.scales.nbytes

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """See Kernel."""
        return self.op.multiply(rows, self.codes, self.scales)


@dataclass(frozen=True, slots=True)
class Int8Format:
    """Implements KeptFormat."""

    op: Int8Op

    def takes(self, weight: KeptWeight) -> bool:
        """See KeptFormat: int8 codes of a checkpoint whose inputs are rounded too."""
        return weight.codes.dtype == torch.int8 and weight.int8_inputs

    def lacking(self, weight: KeptWeight, dtype: torch.dtype) -> str | None:
        """See KeptFormat."""
        beyond = self.op.beyond(weight, dtype)
        if beyond is None and (weight.zeros is not None or weight.scales.shape[1] != 1):
            return "int8 multiplication takes one scale per output and no zeros"
        return beyond

    def pack(self, weight: KeptWeight, dtype: torch.dtype) -> Kernel:
        """See KeptFormat."""
        return Int8Kernel(self.op.lay_out(weight.codes), weight.scales.float().flatten(), self.op)

    def deviation(self, weight: KeptWeight, rows: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
        """See KeptFormat. Weights are exact; an input changes by at most half a step of its token."""
        return norms * rows.float().abs().max() / (2 * LARGEST)


def round_by_token(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 [num_rows, inputs] and each row's step, float32 [num_rows, 1]; a row of zeros has step 0."""
    values = rows.to(torch.float32)
    steps = values.abs().amax(1, keepdim=True) / LARGEST
    rounded = torch.round(values / steps.clamp(min=torch.finfo(torch.float32).tiny))
    return rounded.to(torch.int8), steps


def _multiply(rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rounded, steps = round_by_token(rows)
    missing = _LEAST_ROWS - len(rows)
    if missing > 0:
        rounded = torch.nn.functional.pad(rounded, (0, 0, 0, missing))
    sums = torch._int_mm(rounded, codes.t())[: len(rows)]
    return (sums.to(torch.float32) * steps * scales).to(rows.dtype)


def _beyond(weight: KeptWeight, dtype: torch.dtype) -> str | None:
    outputs, inputs = weight.shape
    if outputs % _MULTIPLE or inputs % _MULTIPLE:
        return f"int8 multiplication takes multiples of {_MULTIPLE} x {_MULTIPLE}, not {outputs} x {inputs}"
    return None


BY_TORCH = Int8Op(_multiply, lambda codes: codes, _beyond)
"""torch._int_mm, on CPUs and GPUs."""
