"""Check --quantization against a checkpoint's config. Without torch, so that every process can check it at start."""

from pathlib import Path
from typing import Any

from engine.quantization.config import QuantizationConfig, compressed_groups
from wire.errors import ConfigError

_METHODS = {"smoothquant": "compressed-tensors", "ascend": "modelslim"}  # values of the flag that are not method names


def check_requested(path: Path, requested: str, config: QuantizationConfig | None) -> None:
    """Raise ConfigError, with both values, if they differ. `config` is that of `path`, None if it has none."""
    if config is None:
        raise ConfigError(
            f"--quantization {requested}, but {path} is not quantised: no quantization_config in config.json"
        )
    if config.method != _METHODS.get(requested, requested):
        raise ConfigError(f"--quantization {requested}, but {config.source} says {config.method}")
    if requested == "smoothquant" and not _is_int8_with_inputs(config):
        raise ConfigError(
            f"--quantization smoothquant means int8 weights and inputs (W8A8), but {config.source} says "
            f"{_widths(config)}"
        )


def _widths(config: QuantizationConfig) -> str:
    """Return the format with the widths of its groups, for the message."""
    kinds = [
        f"{_width(group.get('weights'))} weights and {_width(group.get('input_activations'))} inputs"
        for group in compressed_groups(config)
    ]
    return f"{config.values.get('format', 'no format')} with {' or '.join(dict.fromkeys(kinds)) or 'no config_groups'}"


def _width(part: Any) -> str:
    return f"{part.get('type', 'int')}{part.get('num_bits', 8)}" if isinstance(part, dict) else "unquantised"


def _is_int8_with_inputs(config: QuantizationConfig) -> bool:
    """Whether all weights and inputs are int8: W8A8, which --quantization calls smoothquant."""
    parts = [group.get(key) for group in compressed_groups(config) for key in ("weights", "input_activations")]
    return {_width(part) for part in parts} == {"int8"}
