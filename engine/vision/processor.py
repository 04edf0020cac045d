"""transformers' own image processor: by Pillow, or by torchvision where the device's package for that is installed."""

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import Image
from transformers import AutoImageProcessor

from devices.table import traits_of


def load_processor(folder: Path, device: str) -> Callable[[Image.Image], Any]:
    """Return what turns an image into a checkpoint's inputs; `device` is the tower's."""
    backend, options = "pil", {"return_tensors": "pt"}
    package = traits_of(device).image_package
    if package is not None and find_spec(package) is not None:
        importlib.import_module(package)  # which registers its operators with torchvision
        backend, options = "torchvision", options | {"device": device}
    processor = AutoImageProcessor.from_pretrained(folder, backend=backend, trust_remote_code=False)
    return lambda image: processor(image, **options)
