"""int8 weights with one scale an output, times inputs rounded to int8 token by token (W8A8), by torch._int_mm.

output[t, n] = (inputs[t] . codes[n]) * step[t] * scale[n], the sum exact in int32; step[t] = max |input[t]| / 127
"""

from dataclasses import dataclass

import torch

from engine.quantization.kept import KeptWeight, Kernel

LARGEST = 127
_LEAST_ROWS = 32  # CUDA's multiplication takes more than 16
_MULTIPLE = 8  # of inputs and of outputs, likewise


@dataclass(frozen=True, slots=True)
class Int8Kernel:
    """Implements Kernel. `codes` int8 [outputs, inputs], `scales` float32 [outputs]."""

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """See Kernel."""
        return self.codes.nbytes + self.scales.nbytes

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """See Kernel."""
        rounded, steps = round_by_token(rows)
        missing = _LEAST_ROWS - len(rows)
        if missing > 0:
            rounded = torch.nn.functional.pad(rounded, (0, 0, 0, missing))
        sums = torch._int_mm(rounded, self.codes.t())[: len(rows)]
        return (sums.to(torch.float32) * steps * self.scales).to(rows.dtype)


@dataclass(frozen=True, slots=True)
class Int8Format:
    """Implements KeptFormat."""

    def takes(self, weight: KeptWeight) -> bool:
        """See KeptFormat."""
        return is_w8a8(weight)

    def lacking(self, weight: KeptWeight, dtype: torch.dtype) -> str | None:
        """See KeptFormat."""
        outputs, inputs = weight.shape
        if outputs % _MULTIPLE or inputs % _MULTIPLE:
            return f"int8 multiplication takes multiples of {_MULTIPLE} x {_MULTIPLE}, not {outputs} x {inputs}"
        return beyond_one_scale(weight)

    def pack(self, weight: KeptWeight, dtype: torch.dtype) -> Kernel:
        """See KeptFormat."""
        return Int8Kernel(weight.codes, weight.scales.float().flatten())

    def deviation(self, weight: KeptWeight, rows: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
        """See KeptFormat. Weights are exact; an input moves by at most half a step of its token."""
        return norms * rows.float().abs().max() / (2 * LARGEST)


def is_w8a8(weight: KeptWeight) -> bool:
    """Whether its codes are int8, made for inputs that are rounded too."""
    return weight.codes.dtype == torch.int8 and weight.int8_inputs


def beyond_one_scale(weight: KeptWeight) -> str | None:
    """Return why one product of whole numbers is not all that it takes, or None."""
    if weight.zeros is None and weight.scales.shape[1] == 1:
        return None
    return "int8 multiplication takes one scale an output and no zeros"


def round_by_token(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 [num_rows, inputs] and each row's step, float32 [num_rows, 1]; a row of zeros has step 0."""
    values = rows.to(torch.float32)
    steps = values.abs().amax(1, keepdim=True) / LARGEST
    rounded = torch.round(values / steps.clamp(min=torch.finfo(torch.float32).tiny))
    return rounded.to(torch.int8), steps
