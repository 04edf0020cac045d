"""--quantization against what a checkpoint says of itself. Without torch, so that every process checks it at once."""

from pathlib import Path

from engine.quantization.config import QuantizationConfig, compressed_groups
from wire.errors import ConfigError


def check_asked(path: Path, asked: str, config: QuantizationConfig | None) -> None:
    """Raise ConfigError where they differ, naming both. `config` is what `path` says of itself, None for nothing."""
    if config is None:
        raise ConfigError(f"--quantization {asked}, but {path} is not quantised: its config.json says nothing of it")
    method = "compressed-tensors" if asked == "smoothquant" else asked
    if config.method != method:
        raise ConfigError(f"--quantization {asked}, but {config.source} says {config.method}")
    if asked == "smoothquant" and not _is_int8_with_inputs(config):
        raise ConfigError(
            f"--quantization smoothquant means int8 weights and inputs (W8A8), but {config.source} says "
            f"{config.values.get('format')}, or other widths"
        )


def _is_int8_with_inputs(config: QuantizationConfig) -> bool:
    """Whether all weights and inputs are int8: W8A8, which the guide calls smoothquant."""
    parts = [group.get(key) for group in compressed_groups(config) for key in ("weights", "input_activations")]
    return bool(parts) and all(
        part and (part.get("type", "int"), part.get("num_bits", 8)) == ("int", 8) for part in parts
    )
