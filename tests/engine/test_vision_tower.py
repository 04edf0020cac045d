"""The embeddings of image files are those of transformers' whole model with its own processor."""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from engine.vision.encoded_image import EncodedImage
from engine.vision.processor import load_processor
from engine.vision.tower import VisionTower
from images.checkpoint import read_vision
from images.image_file import decode
from tests.engine.tiny_models import make_tiny_model
from tests.engine.tiny_vision_models import VISION, make_vision_model
from tests.images.image_files import file_of, image_of
from tests.images.tiny_processors import write_processor
from wire.errors import ConfigError

_FILES = [
    file_of(image_of(30, 20)),
    file_of(image_of(20, 31, seed=1), "JPEG"),
    file_of(image_of(64, 20, seed=2, mode="L"), "WEBP"),
    file_of(image_of(9, 9, seed=3), "GIF"),
]


@pytest.fixture(scope="module", params=VISION)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model of each family."""
    name = request.param
    return write_processor(name, make_vision_model(name, tmp_path_factory.mktemp("vision") / name))


@torch.inference_mode()
def by_transformers(folder: Path, data: bytes, dtype: str, wanted: str) -> EncodedImage:
    """Encode a file with the whole model in `dtype` and its own processor; return embeddings in the one `wanted`."""
    network: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    image, vision = decode(data), read_vision(folder)
    inputs = AutoImageProcessor.from_pretrained(folder, backend="pil")(image, return_tensors="pt")
    inputs.pop("num_crops", None)
    inputs["pixel_values"] = inputs["pixel_values"].to(network.dtype)
    rows = torch.cat([part.flatten(0, -2) for part in network.get_image_features(**inputs).pooler_output])
    assert vision is not None
    values = rows.to(getattr(torch, wanted)).view(torch.uint8).numpy().tobytes()
    return EncodedImage(vision.family.tokens(*image.size), values)


@pytest.mark.combinations(1)
@pytest.mark.parametrize(
    ("dtype", "cpu_flags", "computed"),
    [("float32", (), "float32"), ("bfloat16", ("avx512_bf16",), "bfloat16"), ("bfloat16", (), "float32")],
)
def test_embeddings_are_those_of_transformers(
    folder: Path, dtype: str, cpu_flags: tuple[str, ...], computed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.vision.tower.read_cpu_flags", lambda: frozenset(cpu_flags))
    tower = VisionTower(folder, dtype, "cpu")

    assert [tower.encode(data) for data in _FILES] == [
        by_transformers(folder, data, computed, dtype) for data in _FILES
    ]


@pytest.mark.covers("A10.146")
@pytest.mark.parametrize(
    ("device", "installed", "expected"),
    [
        ("npu:1", True, ("torchvision", {"return_tensors": "pt", "device": "npu:1"})),
        ("npu:1", False, ("pil", {"return_tensors": "pt"})),
        ("cpu", True, ("pil", {"return_tensors": "pt"})),
    ],
)
def test_torchvision_npu_prepares_images_where_it_is_installed(
    device: str, installed: bool, expected: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if installed:
        package = ModuleType("torchvision_npu")
        package.__spec__ = ModuleSpec("torchvision_npu", None)
        monkeypatch.setitem(sys.modules, "torchvision_npu", package)

    def load(folder: Path, *, backend: str, trust_remote_code: bool) -> Callable[..., Any]:
        return lambda image, **options: (backend, options)

    monkeypatch.setattr(AutoImageProcessor, "from_pretrained", load)

    assert load_processor(Path(), device)(Image.new("RGB", (4, 4))) == expected


def test_the_text_network_is_not_kept(folder: Path) -> None:
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    text = sum(one.nbytes for name, one in whole.named_parameters() if "language_model" in name or "lm_head" in name)
    every = sum(one.nbytes for one in whole.parameters())

    assert VisionTower(folder, "float32", "cpu").num_bytes == every - text


def test_a_checkpoint_without_the_towers_tensors_is_refused(folder: Path, tmp_path: Path) -> None:
    other = make_tiny_model("llama", tmp_path / "llama")
    for name in ("config.json", "preprocessor_config.json"):
        (other / name).write_bytes((folder / name).read_bytes())

    with pytest.raises(ConfigError, match=r"the vision tower lacks tensors \(\d+\), such as"):
        VisionTower(other, "float32", "cpu")


def test_a_text_model_has_no_tower(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')

    with pytest.raises(ConfigError, match="has no vision tower"):
        VisionTower(tmp_path, "float32", "cpu")
