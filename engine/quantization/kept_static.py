"""W8A8 with static inputs (interface.py, StaticInputs): integer sums, scaled at the end, as vLLM Ascend computes them.

rounded = input * per_step + zero               float32, then to the nearest integer, ties to even, from -128 to 127
output  = (rounded . codes + bias) * scale      int32 sums, a float32 product, rounded to the dtype of the rows

per_step = 1 / step, where both are rounded to the dtype of the rows. In float16 an NPU multiplies by the upper 19 bits
of a scale; the other devices do the same here.

Sources:
    github.com/vllm-project/vllm-ascend/vllm_ascend/quantization/methods/w8a8_static.py (AscendW8A8LinearMethod)
    github.com/vllm-project/vllm-ascend/vllm_ascend/ops/register_custom_ops.py (_quantize_impl)
    gitcode.com/cann/ops-nn/quant/ascend_quant_v2/op_kernel/ascend_quant_v2_bf16.h (Compute), ascend_quant_v2_kernel.h
        (CastOut), quant/trans_quant_param_v2/docs/aclnnTransQuantParamV3.md (the 19 bits)
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.quantization.interface import StaticInputs
from engine.quantization.kept import KeptWeight, Kernel
from engine.quantization.kept_rounded import in_multiples_of, int8_sums

_LOW, _HIGH = -128, 127
_UNREAD_BITS = 13


@dataclass(frozen=True, slots=True)
class StaticOp:
    """A device's functions for static inputs.

    `round` takes rows, per_step [1] and zero [1], all in the rows' dtype, and returns int8; `multiply` takes rounded
    rows, codes, scales, bias and the dtype of the outputs. For `multiply`, `lay_out` arranges codes [outputs, inputs],
    and `lay_out_scales` the scales for outputs in a dtype. `beyond` describes an unsupported shape or dtype, if any.
    """

    round: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    multiply: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.dtype], torch.Tensor]
    lay_out: Callable[[torch.Tensor], torch.Tensor]
    lay_out_scales: Callable[[torch.Tensor, torch.dtype], torch.Tensor]
    beyond: Callable[[KeptWeight, torch.dtype], str | None]


@dataclass(frozen=True, slots=True)
class StaticKernel:
    """Implements Kernel. Its product includes the layer's bias."""

    codes: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    per_step: torch.Tensor
    zero: torch.Tensor
    op: StaticOp

    @property
    def num_bytes(self) -> int:
        """See Kernel."""
        tensors = (self.codes, self.scales, self.bias, self.per_step, self.zero)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """See Kernel."""
        rounded = self.op.round(rows, self.per_step, self.zero)
        return self.op.multiply(rounded, self.codes, self.scales, self.bias, rows.dtype)


@dataclass(frozen=True, slots=True)
class StaticFormat:
    """Implements KeptFormat for weights with static inputs, which no other format handles."""

    op: StaticOp

    @property
    def rounds_inputs(self) -> bool:
        """See KeptFormat."""
        return True

    def handles(self, weight: KeptWeight) -> bool:
        """See KeptFormat."""
        return weight.static is not None

    def lacking(self, weight: KeptWeight, dtype: torch.dtype) -> str | None:
        """See KeptFormat."""
        beyond, static = self.op.beyond(weight, dtype), _static(weight)
        if beyond is None and not per_step(static, dtype, torch.device("cpu")).isfinite():
            return f"an input_scale of {static.step:.3g} is too small for {str(dtype).removeprefix('torch.')}"
        return beyond

    def pack(self, weight: KeptWeight, dtype: torch.dtype) -> Kernel:
        """See KeptFormat."""
        static, device = _static(weight), weight.codes.device
        return StaticKernel(
            self.op.lay_out(weight.codes), self.op.lay_out_scales(static.scales, dtype), static.bias,
            per_step(static, dtype, device), torch.tensor([static.zero], dtype=dtype, device=device), self.op,
        )  # fmt: skip

    def deviation(self, weight: KeptWeight, rows: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
        """See KeptFormat. The expected outputs are rounded too, but a device may round near-ties the other way."""
        of_scales = torch.finfo(torch.float16).eps if rows.dtype == torch.float16 else 0.0
        half_a_step: torch.Tensor = weight.codes.float().norm(dim=1) * _static(weight).scales / 2
        return half_a_step + norms * of_scales


def per_step(static: StaticInputs, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return [1]: steps per unit of an input."""
    return torch.tensor([static.step], dtype=dtype).reciprocal().to(device)


def round_by_step(rows: torch.Tensor, per_step: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Return rows as int8, by the formula at the top of this file."""
    return torch.round(rows.float() * per_step.float() + zero.float()).clamp(_LOW, _HIGH).to(torch.int8)


def upper_bits(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the float32 scales by which outputs in `dtype` are multiplied: for float16, their upper 19 bits."""
    if dtype != torch.float16:
        return scales
    return (scales.view(torch.int32) >> _UNREAD_BITS << _UNREAD_BITS).view(torch.float32)


def reference_outputs(weight: KeptWeight, rows: torch.Tensor) -> torch.Tensor:
    """Return [num_rows, outputs], computed with float32 sums; `rows` are in the layer's dtype."""
    static = _static(weight)
    zero = torch.tensor([static.zero], dtype=rows.dtype, device=rows.device)
    sums = round_by_step(rows, per_step(static, rows.dtype, rows.device), zero).float() @ weight.codes.float().t()
    return (sums if static.bias is None else sums + static.bias) * static.scales


def _static(weight: KeptWeight) -> StaticInputs:
    assert weight.static is not None
    return weight.static


def _multiply(
    rounded: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    sums = int8_sums(rounded, codes)
    return ((sums if bias is None else sums + bias).to(torch.float32) * scales).to(dtype)


def _beyond(weight: KeptWeight, dtype: torch.dtype) -> str | None:
    return None if weight.codes.device.type == "cpu" else in_multiples_of(8, torch.int8)(weight, dtype)


STATIC_BY_TORCH = StaticOp(round_by_step, _multiply, lambda codes: codes, upper_bits, _beyond)
"""By torch._int_mm, on CPUs and GPUs; on CPUs it takes any size."""
