"""Norms, gates and rotations by torch's own ops, for modules that no library supports (engine/modules).

A norm is one op (rms_norm); a gate is two, after one product for both halves; a rotation is three for each of query
and key, compared with five in transformers.
"""

import torch
from torch.nn import functional

from engine.cuda.angle_cache import AngleCache
from engine.modules.activations import KNOWN
from engine.modules.interface import AddNormOp, GateOp, NormOp, NormWeight, RotateOp


class TorchOps:
    """Implements ModuleOps."""

    name = "torch"
    overwrites = False
    joins_heads = True

    def __init__(self) -> None:
        self._angles: AngleCache[tuple[torch.Tensor, torch.Tensor]] = AngleCache(_signed)

    def norm(self, weight: NormWeight) -> NormOp | None:
        """See ModuleOps. Where 1 is added to the weight, weight and rows are in float32."""
        shape, epsilon = weight.weight.shape, weight.epsilon
        if not weight.adds_one:
            return lambda rows: functional.rms_norm(rows, shape, weight.weight, epsilon)
        wide = weight.weight.detach().float() + 1
        return lambda rows: functional.rms_norm(rows.float(), shape, wide, epsilon).to(rows.dtype)

    def add_norm(self, weight: NormWeight) -> AddNormOp | None:
        """See ModuleOps."""
        norm = self.norm(weight)
        assert norm is not None

        def run(made: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            added = rows + made
            return norm(added), added

        return run

    def gate(self, activation: str, dtype: torch.dtype) -> GateOp | None:
        """See ModuleOps."""
        activate = KNOWN[activation]

        def run(both: torch.Tensor) -> torch.Tensor:
            gate, up = both.chunk(2, dim=-1)
            return activate(gate) * up

        return run

    def rotate(self, head_dim: int, dtype: torch.dtype) -> RotateOp | None:
        """See ModuleOps."""
        if head_dim % 2:
            return None

        def run(
            query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            by, across = self._angles(cos, sin)
            turned = (torch.addcmul(rows * by, rows.roll(head_dim // 2, -1), across) for rows in (query, key))
            return next(turned), next(turned)

        return run


def _signed(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of a number and of its partner half a head away: [1, num_tokens, 1, head_dim] each."""
    first, second = sin.chunk(2, dim=-1)
    return cos.unsqueeze(2), torch.cat((-first, second), dim=-1).unsqueeze(2)
