"""transformers' own image processor: by Pillow, or by torchvision on an NPU for which torchvision_npu is installed."""

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import Image
from transformers import AutoImageProcessor


def load_processor(folder: Path, device: str) -> Callable[[Image.Image], Any]:
    """Return what turns an image into a checkpoint's inputs; `device` is the tower's."""
    backend, options = "pil", {"return_tensors": "pt"}
    if device.startswith("npu") and find_spec("torchvision_npu") is not None:
        importlib.import_module("torchvision_npu")  # which registers its operators with torchvision
        backend, options = "torchvision", options | {"device": device}
    processor = AutoImageProcessor.from_pretrained(folder, backend=backend, trust_remote_code=False)
    return lambda image: processor(image, **options)
