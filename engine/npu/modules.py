"""Norms, gates and rotations by ops of torch_npu, for a network's modules (engine/modules).

part            | op
norm            | npu_rms_norm
gated MLP       | npu_swiglu
attention       | npu_apply_rotary_pos_emb, which supports two head sizes, or npu_rotary_mul
decoder layer   | npu_add_rms_norm
"""

from typing import Any

import torch

from engine.modules import replace
from engine.modules.interface import SILU, AddNormOp, GateOp, NormOp, NormWeight, RotateOp

_FUSED_ROTARY_DIMS = (64, 128)
_ROTARY_LIMIT = 896


def replace_modules(network: Any) -> tuple[str, ...]:
    """See engine/modules/replace.py."""
    return replace.replace_modules(network, (NpuOps(),))


class NpuOps:
    """Implements ModuleOps."""

    name = "NPU ops"
    overwrites = False
    joins_heads = False

    def norm(self, weight: NormWeight) -> NormOp | None:
        """See ModuleOps."""
        if weight.adds_one:
            return None

        def run(rows: torch.Tensor) -> torch.Tensor:
            normed: torch.Tensor = torch.ops.npu.npu_rms_norm(rows, weight.weight, weight.epsilon)[0]
            return normed

        return run

    def add_norm(self, weight: NormWeight) -> AddNormOp | None:
        """See ModuleOps."""
        if weight.adds_one:
            return None

        def run(made: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            normed, _rstd, added = torch.ops.npu.npu_add_rms_norm(made, rows, weight.weight, weight.epsilon)
            return normed, added

        return run

    def gate(self, activation: str, dtype: torch.dtype) -> GateOp | None:
        """See ModuleOps."""
        return _swiglu if activation == SILU else None

    def rotate(self, head_dim: int, dtype: torch.dtype) -> RotateOp | None:
        """See ModuleOps."""
        return None if head_dim % 2 or head_dim >= _ROTARY_LIMIT else rotate


def _swiglu(both: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = torch.ops.npu.npu_swiglu(both)
    return made


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return query and key, [1, num_tokens, heads, head_dim], rotated by angles [1, num_tokens, head_dim].

    The fused op writes into its inputs and supports only two head sizes; the other op takes one tensor and any even
    head size.
    """
    cos, sin = (table.to(query.dtype).unsqueeze(2) for table in (cos, sin))
    if query.shape[-1] in _FUSED_ROTARY_DIMS:
        turned: tuple[torch.Tensor, torch.Tensor] = torch.ops.npu.npu_apply_rotary_pos_emb(
            query.contiguous(), key.contiguous(), cos, sin, layout="BSND"
        )
        return turned
    return torch.ops.npu.npu_rotary_mul(query, cos, sin), torch.ops.npu.npu_rotary_mul(key, cos, sin)
