"""torch's float8 products of a GPU by the rules of their sources, in plain arithmetic: their layouts and refusals."""

from typing import Any

import torch
from torch.nn.functional import ScalingType

_FLOAT8 = torch.float8_e4m3fn
_BLOCK = 128


class CardFloat8:
    """Stands in for scaled_mm and _scaled_grouped_mm of a GPU; counts products."""

    def __init__(self) -> None:
        self.num_products = 0

    def scaled_mm(
        self, mat_a: torch.Tensor, mat_b: torch.Tensor, scale_a: torch.Tensor, scale_recipe_a: ScalingType,
        scale_b: torch.Tensor, scale_recipe_b: ScalingType, *, output_dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        """Return [num_rows, outputs] of float8 [num_rows, inputs] and [inputs, outputs].

        Types, and shapes and strides of the scales: _scaled_block1x128_block128x128 (ATen/native/cuda/ScaledBlas.cpp).
        Sizes in 16s and the order of both matrices: _check_scaled_mm_sizes_v2 (torch/_meta_registrations.py). Recipes:
        check_deepseek_recipe (ATen/cuda/CUDAScaledBlas.cpp). The dtypes of the result are those that torch's own tests
        of blocks use (test/test_scaled_matmul_cuda.py).
        """
        self.num_products += 1
        (num_rows, inputs), outputs = mat_a.shape, mat_b.shape[1]
        blocks = -(-inputs // _BLOCK)
        padded = -(-blocks // 4) * 4
        _raise_unless(mat_a.dtype == mat_b.dtype == _FLOAT8, "mat_a and mat_b must be fp8 types")
        _raise_unless(mat_a.stride() == (inputs, 1), "self must be row_major")
        _raise_unless(mat_b.stride() == (1, inputs), "mat2 must be col_major")
        _raise_unless(inputs % 16 == 0 == outputs % 16, "Expected both dimensions of mat2 to be divisible by 16")
        _raise_unless(scale_recipe_a == ScalingType.BlockWise1x128, "unknown recipe")
        _raise_unless(scale_recipe_b == ScalingType.BlockWise128x128, "unknown recipe")
        _raise_unless(scale_a.dtype == scale_b.dtype == torch.float32, "scales must be Float")
        _raise_unless(scale_a.shape == (num_rows, blocks), "scale_a must have shape")
        _raise_unless(scale_a.stride() == (1, num_rows), "scale_a must have strides")
        _raise_unless(scale_b.shape == (padded, -(-outputs // _BLOCK)), "scale_b must have shape")
        _raise_unless(scale_b.stride() == (1, padded), "scale_b must have strides")
        _raise_unless(output_dtype in (torch.bfloat16, torch.float32), "output dtype")
        wide = mat_a.double() * scale_a.double().repeat_interleave(_BLOCK, 1)[:, :inputs]
        factors = scale_b[:blocks].double().repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
        return (wide @ (mat_b.double() * factors[:inputs, :outputs])).to(output_dtype)

    def scaled_grouped_mm(
        self, mat_a: torch.Tensor, mat_b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, *,
        offs: torch.Tensor, out_dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        """Return bfloat16 [num_rows, outputs] of float8 [num_rows, inputs] and [num_groups, inputs, outputs].

        Orders and sizes: _scaled_grouped_mm_cuda (ATen/native/cuda/GroupedBlas.cpp). Types, scales, offsets and the
        result: _meta_grouped_mm_common (torch/_meta_registrations.py).
        """
        self.num_products += 1
        (num_rows, inputs), (num_groups, _, outputs) = mat_a.shape, mat_b.shape
        _raise_unless(mat_a.dtype == mat_b.dtype == _FLOAT8, "Expected inputs of E4M3 FP8 type")
        _raise_unless(mat_a.stride() == (inputs, 1), "Expected mat1 to not be transposed")
        _raise_unless(mat_b.stride() == (inputs * outputs, 1, inputs), "Expected mat2 to be transposed")
        _raise_unless(inputs % 16 == 0 == outputs % 16, "Expected trailing dimensions to be divisible by 16")
        _raise_unless(scale_a.dtype == scale_b.dtype == torch.float32, "For FP8 scales must both be float32")
        _raise_unless(scale_a.shape == (num_rows,), "scale_a must be 1D")
        _raise_unless(scale_b.shape == (num_groups, outputs), "scale_b must be 2D")
        _raise_unless(offs.dtype == torch.int32, "Offsets tensor must be int32")
        _raise_unless(out_dtype == torch.bfloat16, "it must be torch.bfloat16")
        made, start = torch.full((num_rows, outputs), torch.nan, dtype=out_dtype), 0
        for group, end in enumerate(offs.tolist()):
            wide = mat_a[start:end].double() * scale_a[start:end, None].double()
            made[start:end] = (wide @ (mat_b[group].double() * scale_b[group].double())).to(out_dtype)
            start = end
        return made


def _raise_unless(holds: Any, what: str) -> None:
    if not holds:
        raise ValueError(what)
