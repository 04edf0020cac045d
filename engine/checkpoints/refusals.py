"""Refuse unsupported models by their config. engine/kv_probe.py checks what a config does not show."""

from pathlib import Path
from typing import Any

from engine.models.families import FAMILIES, support_of
from wire.errors import ConfigError

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_OTHER_LAYER_TYPES = {
    "linear_attention": "keep a recurrent state instead of keys and values",
    "mamba": "keep a recurrent state instead of keys and values",
    "hybrid": "keep a recurrent state in addition to keys and values",
    "conv": "keep the last inputs of a convolution",
    "chunked_attention": "attend within fixed chunks",
    "indexed_attention": "choose their keys by a separate index",
}
_WITH_IMAGES = ", ".join(one.model_type for one in FAMILIES if one.images is not None)


def refuse_unsupported(path: Path, config: Any, network_class: type[Any]) -> None:
    """Raise ConfigError, with the model's type, the reason and what is supported, if no backend can serve it."""
    kind, text = config.model_type, config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise ConfigError(f"{path}: {kind} is an encoder-decoder model; only decoder-only models run")
    _refuse_layers(path, kind, text, network_class)
    _refuse_other_input(path, kind, config, text)
    if not network_class._supports_attention_backend:
        what = support_of(kind).own_attention
        raise ConfigError(f"{path}: {kind} has {what}; only models that use transformers' attention interface run")


def _refuse_layers(path: Path, kind: str, text: Any, network_class: type[Any]) -> None:
    layer_types = set(getattr(text, "layer_types", None) or ())
    other = sorted(layer_types - _LAYER_TYPES)
    if other:
        default = "do not attend over all keys or a sliding window"
        why = " or ".join(dict.fromkeys(_OTHER_LAYER_TYPES.get(one, default) for one in other))
        raise ConfigError(
            f"{path}: {kind} has layers of type {', '.join(other)}, which {why}; "
            f"only {' and '.join(sorted(_LAYER_TYPES))} run"
        )
    if network_class._is_stateful and not layer_types:
        raise ConfigError(
            f"{path}: {kind} is a state-space or recurrent model, whose layers keep a state instead of keys and "
            "values; only models with attention run"
        )


def _refuse_other_input(path: Path, kind: str, config: Any, text: Any) -> None:
    """Refuse multimodal models: their config contains a separate text config, or a config for images or sound."""
    if support_of(kind).is_audio:
        raise ConfigError(f"{path}: {kind} is an audio model; only models of text and images run")
    others = sorted(name for name in config.sub_configs if getattr(config, name, None) is not text)
    if config is not text or any(word in name for name in others for word in ("vision", "audio", "image")):
        has = f" (it has {', '.join(others)})" if others else ""
        raise ConfigError(f"{path}: {kind} is a multimodal model{has}; of these only {_WITH_IMAGES} run")
