"""Norms, gates and rotations by FlashInfer, for the parts of a network (engine/modules).

op                                                           | takes
rmsnorm, gemma_rmsnorm(input, weight, eps)                   | [rows, width]; rmsnorm also [rows, heads, width]
fused_add_rmsnorm, gemma_...(input, residual, weight, eps)   | [rows, width] each, overwritten with norm and sum
silu_and_mul, gelu_tanh_and_mul, gelu_and_mul(input)         | [rows, 2 * width]
apply_rope_with_cos_sin_cache(positions, query, key, ...)    | [rows, heads * head_dim], rows may be strided;
                                                             | angles [rows, head_dim], cosines then sines, float32

Rows are of 16 bits. Names and rules are those of flashinfer-python 0.7.2; nothing here has run on a GPU yet.
"""

from typing import Any

import torch

from engine.cuda.angle_cache import AngleCache
from engine.modules.interface import AddNormOp, GateOp, NormOp, NormWeight, RotateOp

DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
"""Supported dtypes of rows and weights."""
_BY_HEADS = 4


class FlashInferOps:
    """Implements ModuleOps. An op that the installed release lacks is None."""

    overwrites = True
    joins_heads = True

    def __init__(self, flashinfer: Any, name: str) -> None:
        """`flashinfer` is the module, `name` its name in logs."""
        self.name, self._flashinfer = name, flashinfer
        self._angles: AngleCache[tuple[torch.Tensor, torch.Tensor]] = AngleCache(_table)

    def norm(self, weight: NormWeight) -> NormOp | None:
        """See ModuleOps."""
        op = self._find_op("gemma_rmsnorm" if weight.adds_one else "rmsnorm", weight.weight.dtype)
        if op is None:
            return None

        def run(rows: torch.Tensor) -> torch.Tensor:
            by_heads = rows.dim() == _BY_HEADS and not weight.adds_one
            shaped = rows.flatten(0, 1) if by_heads else rows.reshape(-1, rows.shape[-1])
            made: torch.Tensor = op(shaped, weight.weight, eps=weight.epsilon)
            return made.view(rows.shape)

        return run

    def add_norm(self, weight: NormWeight) -> AddNormOp | None:
        """See ModuleOps."""
        name = "gemma_fused_add_rmsnorm" if weight.adds_one else "fused_add_rmsnorm"
        op = self._find_op(name, weight.weight.dtype)
        if op is None:
            return None

        def run(made: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            normed, added = (one.reshape(-1, one.shape[-1]) for one in (made, rows))
            op(normed, added, weight.weight, eps=weight.epsilon)
            return normed.view(made.shape), added.view(rows.shape)

        return run

    def gate(self, activation: str, dtype: torch.dtype) -> GateOp | None:
        """See ModuleOps."""
        op = self._find_op(f"{activation}_and_mul", dtype)
        if op is None:
            return None

        def run(both: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = op(both.view(-1, both.shape[-1]))
            return made.view(*both.shape[:-1], -1)

        return run

    def rotate(self, head_dim: int, dtype: torch.dtype) -> RotateOp | None:
        """See ModuleOps."""
        op = self._find_op("apply_rope_with_cos_sin_cache", dtype)
        if op is None or head_dim % 2:
            return None

        def run(
            query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            positions, table = self._angles(cos, sin)
            flat = (rows.reshape(len(positions), -1) for rows in (query, key))
            turned: tuple[torch.Tensor, torch.Tensor] = op(positions, *flat, head_dim, table, is_neox=True)
            return turned[0].view(query.shape), turned[1].view(key.shape)

        return run

    def _find_op(self, name: str, dtype: torch.dtype) -> Any:
        return getattr(self._flashinfer, name, None) if dtype in DTYPES else None


def _table(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions [num_tokens] int32 in a table of angles, and the table, with one row per token."""
    half = cos.shape[-1] // 2
    table = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1).float()  # [num_tokens, head_dim]
    return torch.arange(len(table), dtype=torch.int32, device=table.device), table
