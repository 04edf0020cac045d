"""Read the quantisation config of a model folder from any of the files in which tools store it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoints.model_identity import read_json
from wire.errors import ConfigError

_KEYS = ("quantization_config", "compression_config")
_SIDE_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}  # AutoGPTQ and AutoAWQ wrote these before config.json had a key for them
_DESCRIPTION = "quant_model_description*.json"
_MODELSLIM = "modelslim"


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """The quantisation method, its settings, and the file that they came from, for messages."""

    method: str
    values: dict[str, Any]
    source: Path


def read_quantization_config(path: Path) -> QuantizationConfig | None:
    """Return the quantisation config of the folder, None where it has none. Raises ConfigError."""
    described = sorted(path.glob(_DESCRIPTION))
    if len(described) > 1:
        raise ConfigError(f"{path} has several ModelSlim descriptions: {', '.join(file.name for file in described)}")
    if described:
        return QuantizationConfig(_MODELSLIM, read_json(described[0]), described[0])
    config = read_json(path / "config.json")
    for owner in (config, config.get("text_config")):
        for key in _KEYS:
            values = owner.get(key) if isinstance(owner, dict) else None
            if values:
                return _checked(values, None, path / "config.json")
    for name, method in _SIDE_FILES.items():
        if (path / name).is_file():
            return _checked(read_json(path / name), method, path / name)
    return None


def read_block(config: QuantizationConfig, value: Any) -> tuple[int, int] | None:
    """Return the rows and columns of a block with one scale, None for None. Raises ConfigError."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(n, int) and n > 0 for n in value):
        raise ConfigError(f"{config.source}: block size {value} must be two positive numbers")
    return value[0], value[1]


def compressed_groups(config: QuantizationConfig) -> list[dict[str, Any]]:
    """Return the config groups of compressed-tensors. Raises ConfigError."""
    groups = config.values.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ConfigError(f"{config.source}: config_groups must be an object of objects")
    return list(groups.values())


def _checked(values: Any, method: str | None, source: Path) -> QuantizationConfig:
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: its quantization config must be an object, not {type(values).__name__}")
    named = values.get("quant_method", _MODELSLIM if "model_quant_type" in values else method)
    if not isinstance(named, str):
        raise ConfigError(f"{source}: its quantization config has no quant_method")
    return QuantizationConfig(named.lower(), values, source)
