"""The interface of a library of ops for a network's modules; a device lists its libraries, the best first.

op       | takes                                                        | returns
norm     | rows [..., width]                                            | the same shape
add_norm | two of [1, num_tokens, width]; may write into both           | the norm of their sum, and the sum
gate     | [..., 2 * width]: the half to activate, then its factor      | [..., width]
rotate   | query and key [1, num_tokens, heads, head_dim], tokens may   | query and key, rotated
         | be strided; cos and sin [1, num_tokens, head_dim]            |
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

SILU, GELU_TANH, GELU = "silu", "gelu_tanh", "gelu"
"""The activations of known gates."""

NormOp = Callable[[torch.Tensor], torch.Tensor]
AddNormOp = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
GateOp = Callable[[torch.Tensor], torch.Tensor]
RotateOp = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class NormWeight:
    """The factor of a norm: `weight` [width], plus 1 where `adds_one`."""

    weight: torch.Tensor
    epsilon: float
    adds_one: bool = False


class ModuleOps(Protocol):
    """A library's ops; each method returns None for an unsupported case."""

    @property
    def name(self) -> str:
        """The library's name in logs."""
        ...

    @property
    def overwrites(self) -> bool:
        """Whether add_norm writes into its inputs."""
        ...

    @property
    def joins_heads(self) -> bool:
        """Whether rotate takes strided tokens, such as those of a fused QKV projection."""
        ...

    def norm(self, weight: NormWeight) -> NormOp | None:
        """Return the norm with this weight."""
        ...

    def add_norm(self, weight: NormWeight) -> AddNormOp | None:
        """Return the norm of a sum."""
        ...

    def gate(self, activation: str, dtype: torch.dtype) -> GateOp | None:
        """Return the gate op, which combines two halves into one."""
        ...

    def rotate(self, head_dim: int, dtype: torch.dtype) -> RotateOp | None:
        """Return the rotary op, which pairs the halves of a head."""
        ...
