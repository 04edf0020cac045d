"""Products of codes that have one scale per output with inputs rounded to the codes' type token by token.

codes                | largest | sum of a product
int8 (W8A8)          | 127     | exact, in int32
float8_e4m3fn (fp8)  | 448     | in float32

output[t, n] = (inputs[t] . codes[n]) * step[t] * scale[n]; step[t] = max |input[t]| / largest
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.quantization.kept import KeptWeight, Kernel

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_MIN_ROWS = 32  # CUDA's op for int8 needs more than 16


@dataclass(frozen=True, slots=True)
class RoundedOp:
    """A device's multiplication of codes and inputs of type `codes`.

    `multiply` returns [num_rows, outputs] of rows [num_rows, inputs], codes and scales, in the rows' dtype. `lay_out`
    arranges codes [outputs, inputs] for `multiply`. `beyond` describes an unsupported shape or dtype, if any.
    """

    codes: torch.dtype
    multiply: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    lay_out: Callable[[torch.Tensor], torch.Tensor]
    beyond: Callable[[KeptWeight, torch.dtype], str | None]


@dataclass(frozen=True, slots=True)
class RoundedKernel:
    """Implements Kernel. `codes` in the op's layout, `scales` float32 [outputs]."""

    codes: torch.Tensor
    scales: torch.Tensor
    op: RoundedOp

    @property
    def num_bytes(self) -> int:
        """See Kernel."""
        return self.codes.nbytes + self.scales.nbytes

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """See Kernel."""
        return self.op.multiply(rows, self.codes, self.scales)


@dataclass(frozen=True, slots=True)
class RoundedFormat:
    """Implements KeptFormat."""

    op: RoundedOp

    @property
    def rounds_inputs(self) -> bool:
        """See KeptFormat."""
        return True

    def handles(self, weight: KeptWeight) -> bool:
        """See KeptFormat: codes of a checkpoint whose inputs are rounded to their type."""
        return weight.codes.dtype == self.op.codes == weight.rounded_inputs

    def lacking(self, weight: KeptWeight, dtype: torch.dtype) -> str | None:
        """See KeptFormat."""
        beyond = self.op.beyond(weight, dtype)
        if beyond is None and (weight.zeros is not None or weight.scales.shape[1] != 1):
            return f"{_kind(self.op.codes)} multiplication supports one scale per output and no zeros"
        return beyond

    def pack(self, weight: KeptWeight, dtype: torch.dtype) -> Kernel:
        """See KeptFormat."""
        return RoundedKernel(self.op.lay_out(weight.codes), weight.scales.float().flatten(), self.op)

    def deviation(self, weight: KeptWeight, rows: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
        """See KeptFormat. Weights are exact; an input is off by half its token's step, or half an ulp."""
        codes = self.op.codes
        if codes.is_floating_point:
            return norms * (torch.finfo(codes).eps / 2)
        return norms * rows.float().abs().max() / (2 * LARGEST[codes])


def round_by_token(rows: torch.Tensor, codes: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows in `codes` and each row's step, float32 [num_rows, 1]; a row of zeros has step 0."""
    values = rows.to(torch.float32)
    steps = values.abs().amax(1, keepdim=True) / LARGEST[codes]
    scaled = values / steps.clamp(min=torch.finfo(torch.float32).tiny)
    return (scaled if codes.is_floating_point else torch.round(scaled)).to(codes), steps


def int8_sums(rounded: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return int32 [num_rows, outputs] of int8 rows and codes [outputs, inputs], by torch._int_mm."""
    missing = 0 if rounded.device.type == "cpu" else _MIN_ROWS - len(rounded)
    padded = torch.nn.functional.pad(rounded, (0, 0, 0, missing)) if missing > 0 else rounded
    return torch._int_mm(padded, codes.t())[: len(rounded)]


def _int8(rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rounded, steps = round_by_token(rows, torch.int8)
    return (int8_sums(rounded, codes).to(torch.float32) * steps * scales).to(rows.dtype)


def _float8(rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rounded, steps = round_by_token(rows, torch.float8_e4m3fn)
    one = torch.ones((), device=rows.device)  # one scale per product, which CPUs and all these GPUs support
    sums = torch._scaled_mm(rounded, codes.t(), one, one, out_dtype=torch.float32)
    return (sums * steps * scales).to(rows.dtype)


def in_multiples_of(size: int, codes: torch.dtype) -> Callable[[KeptWeight, torch.dtype], str | None]:
    """Return a check for a multiplication of codes that supports only multiples of `size`."""

    def beyond(weight: KeptWeight, dtype: torch.dtype) -> str | None:
        outputs, inputs = weight.shape
        if outputs % size or inputs % size:
            return f"{_kind(codes)} multiplication supports multiples of {size} x {size}, not {outputs} x {inputs}"
        return None

    return beyond


def _kind(codes: torch.dtype) -> str:
    return str(codes).removeprefix("torch.").removesuffix("_e4m3fn")


INT8_BY_TORCH = RoundedOp(torch.int8, _int8, lambda codes: codes, in_multiples_of(8, torch.int8))
"""torch._int_mm, on CPUs and GPUs."""
FLOAT8_BY_TORCH = RoundedOp(
    torch.float8_e4m3fn, _float8, lambda codes: codes, in_multiples_of(16, torch.float8_e4m3fn)
)  # fmt: skip
"""torch._scaled_mm, on CPUs and, from compute capability 8.9 on, on GPUs: sizes as in _check_scaled_mm_sizes
(torch/_meta_registrations.py)."""
