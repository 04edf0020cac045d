"""What a model answers with: text, vectors or scores. Told from its config.json, as the engine tells it."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class ModelKind(StrEnum):
    """Text models make vectors too; the other two generate nothing."""

    TEXT = "text"
    VECTORS = "vectors"
    SCORES = "scores"

    @property
    def does(self) -> str:
        """What a model of this kind does, in words."""
        return _DOES[self]


_DOES = {
    ModelKind.TEXT: "generates text",
    ModelKind.VECTORS: "makes vectors",
    ModelKind.SCORES: "scores pairs of texts",
}
_READS_ONLY = ("Model", "ForMaskedLM", "ForPreTraining")


def kind_of(config: Mapping[str, Any]) -> ModelKind:
    """Return the kind that the architecture's name says; text where it says none."""
    architectures = config.get("architectures")
    named = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    if named.endswith("ForSequenceClassification"):
        return ModelKind.SCORES
    if named.endswith(_READS_ONLY) and not named.endswith("LMHeadModel"):
        return ModelKind.VECTORS
    return ModelKind.TEXT


def unused_positions(config: Mapping[str, Any]) -> int:
    """Return how many of its positions no text can have: those of RoBERTa and its kin begin behind the padding's."""
    family, padding = str(config.get("model_type")), config.get("pad_token_id")
    begins_later = "roberta" in family or family == "camembert"
    return padding + 1 if begins_later and isinstance(padding, int) else 0
