"""The loader's interface to a checkpoint's tensors: by name, and only the part that a rank owns.

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
    """Named tensors, read part by part, when `read` is called."""

    @property
    def names(self) -> Sequence[str]:
        """All tensors, sorted."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's whole shape. Raises KeyError for an unknown name."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the tensors that `read` returns."""
        ...

    def read(self, name: str, part: TensorSlice | None = None) -> torch.Tensor:
        """Return the whole tensor, or a range of one dimension, in newly allocated memory."""
        ...
