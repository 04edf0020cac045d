"""Cache of values derived from a step's rotary angles, for all layers with the same angles."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

Made = TypeVar("Made")
_KINDS = 2
"""Kinds of angles in one network: for sliding-window layers, and for the others."""


class AngleCache(Generic[Made]):
    """Owns the last derived values. A step's angles are one tensor, which no later step writes to."""

    def __init__(self, make: Callable[[torch.Tensor, torch.Tensor], Made]) -> None:
        self._make = make
        self._known: list[tuple[torch.Tensor, Made]] = []

    def __call__(self, cos: torch.Tensor, sin: torch.Tensor) -> Made:
        """Return the values derived from these angles, from the cache if they are recent."""
        for known, made in self._known:
            if known is cos:
                return made
        made = self._make(cos, sin)
        self._known = [*self._known[1 - _KINDS :], (cos, made)]
        return made
