"""What was made of a step's angles, for all layers that turn by the same ones."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

Made = TypeVar("Made")
_KINDS = 2
"""Of angles that the layers of one network take in turn: of a window's layers, and of the others."""


class AngleCache(Generic[Made]):
    """Owner of what was made last. A step's angles are one tensor, which no later step writes to."""

    def __init__(self, make: Callable[[torch.Tensor, torch.Tensor], Made]) -> None:
        self._make = make
        self._known: list[tuple[torch.Tensor, Made]] = []

    def __call__(self, cos: torch.Tensor, sin: torch.Tensor) -> Made:
        """Return what is made of these, made once while they are among the last."""
        for known, made in self._known:
            if known is cos:
                return made
        made = self._make(cos, sin)
        self._known = [*self._known[1 - _KINDS :], (cos, made)]
        return made
