"""Decoders without an output layer, as embedding models are published (architecture MistralModel and similar).

They are loaded as the causal model of the same type: its prefix is added to the stored names, and its output layer
shares the embeddings, so no weights are added. They generate no text.
"""

from engine.checkpoints.checkpoint import Checkpoint
from engine.checkpoints.renamed_weights import RenamedWeights
from engine.checkpoints.weights import Weights


def is_headless(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint has a decoder without an output layer."""
    named = (checkpoint.config.architectures or [""])[0]
    return named.endswith("Model") and not named.endswith("LMHeadModel")


def tie_head(checkpoint: Checkpoint) -> None:
    """Change the checkpoint's config so that the output layer shares the embeddings."""
    checkpoint.config.tie_word_embeddings = True
    checkpoint.text_config.tie_word_embeddings = True


def headless_weights(stored: Weights, prefix: str) -> RenamedWeights:
    """Return the stored tensors by their names in the causal model, where the decoder is `prefix`, such as `model`."""
    return RenamedWeights(stored, {f"{prefix}.{name}": name for name in stored.names})
