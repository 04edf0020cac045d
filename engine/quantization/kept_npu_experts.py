"""Experts that stay quantised on an NPU: W8A8, by npu_dynamic_quant and npu_grouped_matmul.

weights int8 [experts, inputs, outputs]; scales [experts, outputs] in bfloat16, or in float32 for float16 rows: the
dtypes, and the rule that the last end is the number of rows, are from torch_npu's page on npu_grouped_matmul
(op-plugin, docs/zh/custom_APIs/torch_npu).
"""

import torch

from engine.quantization.compact import CompactWeights
from engine.quantization.kept_experts import RoundedExpertsOp

SCALES: dict[torch.dtype, torch.dtype] = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}
_INNER_LIMIT, _MAX_EXPERTS = 65_536, 1024
_BY_ROWS, _ONE_RESULT, _ENDS = 0, 3, 0  # group_type, split_item and group_list_type of the op


def _multiply(rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    rounded, steps = torch.ops.npu.npu_dynamic_quant(rows)
    made: torch.Tensor = torch.ops.npu.npu_grouped_matmul(
        [rounded], [codes], scale=[scales], per_token_scale=[steps], group_list=ends, split_item=_ONE_RESULT,
        group_type=_BY_ROWS, group_list_type=_ENDS, output_dtype=rows.dtype,
    )[0]  # fmt: skip
    return made


def _beyond(weights: CompactWeights) -> str | None:
    num_experts, *sizes = weights.shape
    if num_experts > _MAX_EXPERTS:
        return f"{num_experts} experts: npu_grouped_matmul supports at most {_MAX_EXPERTS}"
    if max(sizes) >= _INNER_LIMIT:
        return f"experts of {max(sizes)} columns: npu_grouped_matmul supports fewer than {_INNER_LIMIT}"
    return None


W8A8_EXPERTS = RoundedExpertsOp(
    "npu_grouped_matmul", torch.int8, _multiply, SCALES, lambda codes: codes.transpose(1, 2).contiguous(), _beyond
)  # fmt: skip
