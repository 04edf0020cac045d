"""A checkpoint's tensors under other names, some of them left out."""

from collections.abc import Mapping, Sequence

import torch

from engine.checkpoints.weights import TensorSlice, Weights


class RenamedWeights:
    """The tensors of `stored` by new names. Implements Weights."""

    def __init__(self, stored: Weights, stored_names: Mapping[str, str]) -> None:
        """`stored_names` has the stored name for each new one."""
        self._stored, self._stored_names = stored, stored_names

    @property
    def names(self) -> Sequence[str]:
        """All tensors, sorted."""
        return sorted(self._stored_names)

    def shape(self, name: str) -> tuple[int, ...]:
        """See Weights.shape."""
        return self._stored.shape(self._stored_names[name])

    def dtype(self, name: str) -> torch.dtype:
        """See Weights.dtype."""
        return self._stored.dtype(self._stored_names[name])

    def read(self, name: str, part: TensorSlice | None = None) -> torch.Tensor:
        """See Weights.read."""
        return self._stored.read(self._stored_names[name], part)
