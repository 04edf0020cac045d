"""Experts on a GPU by torch's grouped product (engine/modules/experts.py).

For bfloat16 it is one kernel from compute capability 8.0 on, with the groups' ends on the device. For other dtypes
torch reads the ends on the host and multiplies group by group, which a graph cannot capture: experts of other dtypes
are not replaced.
"""

from typing import Any

import torch
from torch.nn import functional

from engine.modules import experts

DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16,)
_STEP_BYTES = 16


def use_grouped_experts(network: Any) -> tuple[str, ...]:
    """See engine/modules/experts.py."""
    return experts.use_grouped_experts(network, TorchGrouped())


class TorchGrouped:
    """Implements GroupedOps."""

    name = "torch"
    implementation = "pdserve_torch_grouped"

    def unsupported(self, layer: Any) -> str | None:
        """See GroupedOps."""
        weight = layer.down_proj
        if not hasattr(functional, "grouped_mm"):
            return f"torch {torch.__version__} has no grouped_mm"
        if weight.dtype not in DTYPES:
            return f"experts of {weight.dtype}: grouped_mm multiplies only bfloat16 in one call"
        odd = [size for size in weight.shape[1:] if size * weight.itemsize % _STEP_BYTES]
        if odd:
            return f"experts with {odd[0]} columns: grouped_mm requires rows of a multiple of {_STEP_BYTES} bytes"
        return None

    def multiply(self, rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """See GroupedOps."""
        return functional.grouped_mm(rows, weight, offs=ends.to(torch.int32))
