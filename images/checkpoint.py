"""Read what a checkpoint's folder says about images: config.json and the settings of its image processor."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from images.families import VISION_TYPES, VisionFamily, vision_family
from wire.errors import ConfigError

_MAX_BYTES = 4 * 2**20
_LLAMA_SIZE = 4096  # transformers' default for a llama, as in LLaVA 1.5 7B
_PREPROCESSOR, _PROCESSOR = "preprocessor_config.json", "processor_config.json"


@dataclass(frozen=True, slots=True)
class VisionCheckpoint:
    """A checkpoint that takes images: its family, and the sha256 of its image processor's settings.

    `hidden_size` is the number of values of an embedding, None where config.json leaves it to a default.
    """

    family: VisionFamily
    settings_digest: bytes
    hidden_size: int | None


def read_vision(folder: Path) -> VisionCheckpoint | None:
    """Return what `folder` says about images, None for a model without a vision tower. Raises ConfigError."""
    config = _read(folder / "config.json")
    if config.get("model_type") not in VISION_TYPES:
        return None
    processor = processor_settings(folder)
    try:
        family = vision_family(config, processor)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from error
    assert family is not None
    settings = json.dumps(processor, sort_keys=True).encode()
    return VisionCheckpoint(family, hashlib.sha256(settings).digest(), _hidden_size(config))


def processor_settings(folder: Path) -> dict[str, Any]:
    """Return the image processor's settings; transformers 5 also writes them into processor_config.json."""
    own = folder / _PREPROCESSOR
    if own.is_file():
        return _read(own)
    shared = folder / _PROCESSOR
    part = _read(shared).get("image_processor") if shared.is_file() else None
    if not isinstance(part, dict):
        raise ConfigError(f"{folder} has no {_PREPROCESSOR}, which a model that takes images needs")
    return part


def _hidden_size(config: dict[str, Any]) -> int | None:
    """Return the hidden size of the text network, whose settings are at the top level in older files."""
    text = config.get("text_config")
    found = (text if isinstance(text, dict) else config).get("hidden_size", config.get("hidden_size"))
    if found is None and isinstance(text, dict) and text.get("model_type") == "llama":
        return _LLAMA_SIZE
    return found if isinstance(found, int) else None


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path} has {path.stat().st_size} bytes, but the limit is {_MAX_BYTES}")
        read = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a readable JSON file: {error}") from error
    if not isinstance(read, dict):
        raise ConfigError(f"{path} must be a JSON object")
    return read
