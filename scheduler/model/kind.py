"""The kind of a model's output: text, vectors or scores; derived from config.json, like in the engine."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class ModelKind(StrEnum):
    """Text models can also return vectors; the other two generate nothing."""

    TEXT = "text"
    VECTORS = "vectors"
    SCORES = "scores"

    @property
    def does(self) -> str:
        """What a model of this kind does, for messages."""
        return _DOES[self]


_DOES = {
    ModelKind.TEXT: "generates text",
    ModelKind.VECTORS: "makes vectors",
    ModelKind.SCORES: "scores pairs of texts",
}
_READS_ONLY = ("Model", "ForMaskedLM", "ForPreTraining")


def kind_of(config: Mapping[str, Any]) -> ModelKind:
    """Return the kind given by the architecture's name; text if it gives none."""
    architectures = config.get("architectures")
    named = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    if named.endswith("ForSequenceClassification"):
        return ModelKind.SCORES
    if named.endswith(_READS_ONLY) and not named.endswith("LMHeadModel"):
        return ModelKind.VECTORS
    return ModelKind.TEXT
