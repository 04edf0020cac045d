"""The text network of a checkpoint with a vision tower: its config, and its tensors by the names of a text model.

    stored by transformers 5              | before                        | here
    model.language_model.layers.0 ...     | language_model.model.layers.0 | model.layers.0 ...
    lm_head.weight                        | language_model.lm_head.weight | lm_head.weight
    model.visual, model.vision_tower ...  | visual, vision_tower ...      | left out

Qwen2-VL's first files store its text network as `model.layers.0`, beside `visual`.
"""

import re
from typing import Any

from transformers import AutoConfig

from engine.checkpoints.renamed_weights import RenamedWeights
from engine.checkpoints.weights import Weights
from engine.models.families import support_of
from engine.models.support import ImageSupport

_SECTIONS, _DEFAULT_SECTIONS = "mrope_section", (16, 24, 24)
_DECODER = re.compile(
    r"(?:model\.language_model|language_model\.model|model(?=\.(?:layers|embed_tokens|norm)\.))\.(.+)"
)
_HEAD = re.compile(r"(?:language_model\.)?(lm_head\..+)")


def image_support(config: Any) -> ImageSupport | None:
    """Return how the images of a checkpoint with this config are served, None if it takes no images."""
    return support_of(config.model_type).images


def text_network_config(config: Any, images: ImageSupport) -> Any:
    """Return the config of the text network as a model of its own."""
    text = config.get_text_config(decoder=True)
    values: dict[str, Any] = {
        **text.to_dict(),
        "architectures": None,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    values["model_type"] = images.text_type or values["model_type"]
    if images.has_grid_positions:
        values["rope_parameters"] = {k: v for k, v in values["rope_parameters"].items() if k != _SECTIONS}
    return AutoConfig.for_model(**values)


def rope_sections(config: Any, images: ImageSupport) -> tuple[int, ...]:
    """Return how many dimensions of half a head each position of a token rotates; empty if tokens have one position."""
    if not images.has_grid_positions:
        return ()
    return tuple(config.get_text_config(decoder=True).rope_parameters.get(_SECTIONS, _DEFAULT_SECTIONS))


def text_weights(stored: Weights) -> RenamedWeights:
    """Return the text network's tensors."""
    return RenamedWeights(stored, {new: name for name in stored.names if (new := _text_name(name)) is not None})


def _text_name(stored: str) -> str | None:
    if (decoder := _DECODER.fullmatch(stored)) is not None:
        return f"model.{decoder[1]}"
    head = _HEAD.fullmatch(stored)
    return None if head is None else head[1]
