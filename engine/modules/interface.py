"""What a library of ops has for the parts of a network; a device names its libraries, the best first.

op       | takes                                                        | makes
norm     | rows [..., width]                                            | the same shape
add_norm | two of [1, num_tokens, width]; may write into both           | the norm of their sum, and the sum
gate     | [..., 2 * width]: what is activated, then what it multiplies | [..., width]
rotate   | query and key [1, num_tokens, heads, head_dim], whose tokens | query and key turned
         | may lie apart; cos and sin [1, num_tokens, head_dim]         |
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

SILU, GELU_TANH, GELU = "silu", "gelu_tanh", "gelu"
"""Activations that gates are known by."""

NormOp = Callable[[torch.Tensor], torch.Tensor]
AddNormOp = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
GateOp = Callable[[torch.Tensor], torch.Tensor]
RotateOp = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class NormWeight:
    """What a norm multiplies by: `weight` [width], and one more of it where `adds_one`."""

    weight: torch.Tensor
    epsilon: float
    adds_one: bool = False


class ModuleOps(Protocol):
    """A library's ops; each is None where it has none for what is asked."""

    @property
    def name(self) -> str:
        """What people are told."""
        ...

    @property
    def overwrites(self) -> bool:
        """Whether add_norm writes into what it takes."""
        ...

    @property
    def joins_heads(self) -> bool:
        """Whether rotate takes tokens that lie apart, as in one product for queries, keys and values."""
        ...

    def norm(self, weight: NormWeight) -> NormOp | None:
        """Return the norm by a weight."""
        ...

    def add_norm(self, weight: NormWeight) -> AddNormOp | None:
        """Return the norm of a sum."""
        ...

    def gate(self, activation: str, dtype: torch.dtype) -> GateOp | None:
        """Return what makes one of two halves."""
        ...

    def rotate(self, head_dim: int, dtype: torch.dtype) -> RotateOp | None:
        """Return what turns queries and keys by half their width."""
        ...
