"""Experts on an NPU by npu_grouped_matmul (engine/modules/experts.py)."""

from typing import Any

import torch

from engine.modules import experts

_INNER_LIMIT, _MAX_EXPERTS = 65_536, 1024
_BY_ROWS, _ONE_RESULT, _ENDS = 0, 3, 0  # group_type, split_item and group_list_type of the op


def use_grouped_experts(network: Any) -> tuple[str, ...]:
    """See engine/modules/experts.py."""
    return experts.use_grouped_experts(network, NpuGrouped())


class NpuGrouped:
    """Implements GroupedOps."""

    name = "NPU ops"
    implementation = "pdserve_npu_grouped"

    def unsupported(self, layer: Any) -> str | None:
        """See GroupedOps."""
        if layer.num_experts > _MAX_EXPERTS:
            return f"{layer.num_experts} experts: npu_grouped_matmul supports at most {_MAX_EXPERTS}"
        width = max(layer.down_proj.shape[1:])
        if width >= _INNER_LIMIT:
            return f"experts of {width} columns: npu_grouped_matmul supports fewer than {_INNER_LIMIT}"
        return None

    def multiply(self, rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """See GroupedOps."""
        made: torch.Tensor = torch.ops.npu.npu_grouped_matmul(
            [rows], [weight], group_list=ends, split_item=_ONE_RESULT, group_type=_BY_ROWS, group_list_type=_ENDS
        )[0]
        return made
