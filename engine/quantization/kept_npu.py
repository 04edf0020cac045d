"""Linear layers that stay quantised on an NPU: W8A8, dynamic and static, and weights of 4 or 8 bits with float inputs.

op                                      | weight                                     | scales
npu_dynamic_quant, npu_quant_matmul     | int8 [inputs, outputs]                     | float32 [outputs]
npu_quantize, npu_quant_matmul          | the same                                   | the same; for float16 outputs
                                        |                                            | int64 with the float32's bits
npu_weight_quant_batchmatmul            | int8 as above, or eight int4 per int32     | [groups, outputs] in the
                                        | [inputs, outputs / 8]                      | rows' dtype, offsets too

The last op computes with (weight + offset) * scale; group size 0 means one group. Source: _op_plugin_docs.py in
torch_npu's wheel.
"""

from dataclasses import dataclass
from typing import Any

import torch

from engine.quantization.kept import KeptWeight, Kernel
from engine.quantization.kept_rounded import RoundedOp
from engine.quantization.kept_static import StaticOp, upper_bits

DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
"""Supported dtypes of rows."""
_MAX_SIZE = 65_535
_GROUP_STEP, _PER_WORD = 32, 8
_MIDDLE_OF_4, _MIDDLE_OF_8 = 8, 128


@dataclass(frozen=True, slots=True)
class AntiquantKernel:
    """Implements Kernel. `group_size` 0 means one group."""

    packed: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    group_size: int

    @property
    def num_bytes(self) -> int:
        """See Kernel."""
        return self.packed.nbytes + self.scales.nbytes + self.offsets.nbytes

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """See Kernel."""
        product: torch.Tensor = torch.ops.npu.npu_weight_quant_batchmatmul(
            rows, self.packed, self.scales, antiquant_offset=self.offsets, antiquant_group_size=self.group_size
        )
        return product


@dataclass(frozen=True, slots=True)
class AntiquantFormat:
    """Implements KeptFormat for codes of 4 and 8 bits."""

    @property
    def rounds_inputs(self) -> bool:
        """See KeptFormat."""
        return False

    def handles(self, weight: KeptWeight) -> bool:
        """See KeptFormat."""
        return weight.num_bits is not None and weight.static is None

    def lacking(self, weight: KeptWeight, dtype: torch.dtype) -> str | None:
        """See KeptFormat."""
        outputs, inputs = weight.shape
        size = weight.group_size
        if weight.num_bits == 4 and outputs % _PER_WORD:
            return f"npu_convert_weight_to_int4pack supports outputs in multiples of {_PER_WORD}, not {outputs}"
        if size != inputs and size % _GROUP_STEP:
            return f"npu_weight_quant_batchmatmul supports groups in multiples of {_GROUP_STEP} inputs, not {size}"
        return _beyond("npu_weight_quant_batchmatmul", weight, dtype)

    def pack(self, weight: KeptWeight, dtype: torch.dtype) -> Kernel:
        """See KeptFormat."""
        middle = _middle(weight)
        codes = (weight.codes.to(torch.int32) - middle).t().contiguous()  # [inputs, outputs]
        zeros = torch.zeros_like(weight.scales) if weight.zeros is None else weight.zeros
        offsets = middle - zeros.to(torch.float32)
        packed: Any = codes.to(torch.int8)
        if weight.num_bits == 4:
            packed = torch.ops.npu.npu_convert_weight_to_int4pack(codes)
        scales, offsets = (each.t().to(dtype).contiguous() for each in (weight.scales, offsets))  # [groups, outputs]
        return AntiquantKernel(packed, scales, offsets, 0 if len(scales) == 1 else weight.group_size)

    def deviation(self, weight: KeptWeight, rows: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
        """See KeptFormat. The scale and its product are rounded by at most one unit roundoff; the sum is exact."""
        return norms * torch.finfo(rows.dtype).eps


def _middle(weight: KeptWeight) -> int:
    """Return the offset to subtract from unsigned codes to make them signed: 0 for int8."""
    if weight.codes.dtype == torch.int8:
        return 0
    return _MIDDLE_OF_4 if weight.num_bits == 4 else _MIDDLE_OF_8


def _beyond(op: str, weight: KeptWeight, dtype: torch.dtype) -> str | None:
    outputs, inputs = weight.shape
    if dtype not in DTYPES:
        return f"{op} supports float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if max(weight.shape) > _MAX_SIZE:
        return f"{op} supports at most {_MAX_SIZE} x {_MAX_SIZE}, not {outputs} x {inputs}"
    return None


def _multiply(rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rounded, steps = torch.ops.npu.npu_dynamic_quant(rows)
    product: torch.Tensor = torch.ops.npu.npu_quant_matmul(
        rounded, codes, scales, pertoken_scale=steps, output_dtype=rows.dtype
    )
    return product


def _round_by_step(rows: torch.Tensor, per_step: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    rounded: torch.Tensor = torch.ops.npu.npu_quantize(rows, per_step, zero, torch.qint8, axis=-1, div_mode=False)
    return rounded


def _multiply_static(
    rounded: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    product: torch.Tensor = torch.ops.npu.npu_quant_matmul(rounded, codes, scales, bias=bias, output_dtype=dtype)
    return product


def _scales(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype != torch.float16:
        return scales
    return upper_bits(scales, dtype).view(torch.int32).to(torch.int64)


def _transposed(codes: torch.Tensor) -> torch.Tensor:
    return codes.t().contiguous()


def _beyond_product(weight: KeptWeight, dtype: torch.dtype) -> str | None:
    return _beyond("npu_quant_matmul", weight, dtype)


W8A8 = RoundedOp(torch.int8, _multiply, _transposed, _beyond_product)
"""The int8 multiplication of engine/quantization/kept_rounded.py on an NPU."""
STATIC_W8A8 = StaticOp(_round_by_step, _multiply_static, _transposed, _scales, _beyond_product)
"""That of engine/quantization/kept_static.py, by the calls of vLLM Ascend's AscendW8A8LinearMethod."""
