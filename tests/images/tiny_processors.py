"""The image processor's settings for the tiny models of tests/engine/tiny_vision_models.py."""

import json
from pathlib import Path
from typing import Any

PROCESSORS: dict[str, dict[str, Any]] = {
    "llava": {
        "image_processor_type": "CLIPImageProcessor",
        "crop_size": {"height": 20, "width": 20},
        "size": {"shortest_edge": 20},
    },
}


def write_processor(name: str, folder: Path) -> Path:
    """Write the settings of model type `name` into `folder`; return `folder`."""
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[name]))
    return folder
