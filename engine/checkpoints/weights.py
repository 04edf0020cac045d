"""A checkpoint's tensors as the loader asks for them: by name, and only the part a rank owns.

safetensors files --StoredWeights--> [dequantising reader, where the checkpoint is quantised] --> loader
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Indices [start, end) of dimension `dim` of a tensor."""

    dim: int
    start: int
    end: int


class Weights(Protocol):
    """Named tensors, read part by part. Nothing is read before it is asked for."""

    @property
    def names(self) -> Sequence[str]:
        """All tensors, sorted."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's whole shape. Raises KeyError for a name that is not there."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that `read` gives."""
        ...

    def read(self, name: str, part: TensorSlice | None = None) -> torch.Tensor:
        """Return a tensor of its own memory: the whole one, or one range of one dimension of it."""
        ...
