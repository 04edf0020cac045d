"""The image processor's settings for the tiny models of tests/engine/tiny_vision_models.py."""

import json
from pathlib import Path
from typing import Any

_QWEN: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 16 * 16, "longest_edge": 48 * 48},
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "llava": {
        "image_processor_type": "CLIPImageProcessor",
        "crop_size": {"height": 20, "width": 20},
        "size": {"shortest_edge": 20},
    },
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}},
}


def write_processor(name: str, folder: Path) -> Path:
    """Write the settings of model type `name` into `folder`; return `folder`."""
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[name]))
    return folder
