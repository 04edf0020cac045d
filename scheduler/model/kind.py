"""The kind of a model's output: text, vectors, scores or classes; derived from config.json, as in the engine."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class ModelKind(StrEnum):
    """Text models can also return vectors; the others generate nothing."""

    TEXT = "text"
    VECTORS = "vectors"
    SCORES = "scores"
    CLASSES = "classes"

    @property
    def does(self) -> str:
        """What a model of this kind does, for messages."""
        return _DOES[self]


_DOES = {
    ModelKind.TEXT: "generates text",
    ModelKind.VECTORS: "makes vectors",
    ModelKind.SCORES: "scores pairs of texts",
    ModelKind.CLASSES: "classifies texts",
}
_READS_ONLY = ("Model", "ForMaskedLM", "ForPreTraining")


def kind_of(config: Mapping[str, Any]) -> ModelKind:
    """Return the kind given by the architecture's name; text if it gives none."""
    architectures = config.get("architectures")
    named = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    if named.endswith("ForSequenceClassification"):
        return ModelKind.SCORES if len(labels_of(config)) == 1 else ModelKind.CLASSES
    if named.endswith(_READS_ONLY) and not named.endswith("LMHeadModel"):
        return ModelKind.VECTORS
    return ModelKind.TEXT


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a classifier's classes, in order; if it names none, LABEL_0 and so on, as in transformers."""
    named, count = config.get("id2label"), config.get("num_labels")
    if isinstance(named, Mapping):
        return tuple(str(named[key]) for key in sorted(named, key=lambda key: (len(key), key)))
    return tuple(f"LABEL_{index}" for index in range(count if type(count) is int else 2))
