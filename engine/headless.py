"""Decoders without an output layer, as embedding models are published (architecture MistralModel and similar).

They are loaded as the causal model of the same type: its prefix is added to the stored names, and its output layer
shares the embeddings, so no weights are added. They generate no text.
"""

from collections.abc import Sequence

import torch

from engine.checkpoints.checkpoint import Checkpoint
from engine.checkpoints.weights import TensorSlice, Weights


def is_headless(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint has a decoder without an output layer."""
    named = (checkpoint.config.architectures or [""])[0]
    return named.endswith("Model") and not named.endswith("LMHeadModel")


def tie_head(checkpoint: Checkpoint) -> None:
    """Change the checkpoint's config so that the output layer shares the embeddings."""
    checkpoint.config.tie_word_embeddings = True
    checkpoint.text_config.tie_word_embeddings = True


class HeadlessWeights:
    """The stored tensors by their names in the causal model. Implements Weights."""

    def __init__(self, stored: Weights, prefix: str) -> None:
        """`prefix` is the decoder's name in the causal model, such as `model`."""
        self._stored, self._prefix = stored, f"{prefix}."

    @property
    def names(self) -> Sequence[str]:
        """All tensors, sorted."""
        return [self._prefix + name for name in self._stored.names]

    def shape(self, name: str) -> tuple[int, ...]:
        """See Weights.shape."""
        return self._stored.shape(self._without_prefix(name))

    def dtype(self, name: str) -> torch.dtype:
        """See Weights.dtype."""
        return self._stored.dtype(self._without_prefix(name))

    def read(self, name: str, part: TensorSlice | None = None) -> torch.Tensor:
        """See Weights.read."""
        return self._stored.read(self._without_prefix(name), part)

    def _without_prefix(self, name: str) -> str:
        if not name.startswith(self._prefix):
            raise KeyError(name)
        return name.removeprefix(self._prefix)
