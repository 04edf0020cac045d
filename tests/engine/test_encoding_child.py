"""The encoding process over real towers, exact against transformers; a bad file, crash or stop ends nothing else."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from engine.vision.encoded_image import EncodedImage, EncoderLimits
from engine.vision.encoding_child import EncodingChild, TowerSettings
from images.checkpoint import read_vision
from images.image_file import decode
from tests.engine.tiny_models import make_tiny_model
from tests.engine.tiny_vision_models import VISION, make_vision_model
from tests.images.image_files import file_of, image_of
from tests.images.tiny_processors import write_processor
from wire.errors import ConfigError, DeadlineExceeded, InvalidRequest

_LIMITS = EncoderLimits()
_FILES = [
    file_of(image_of(30, 20)),
    file_of(image_of(20, 31, seed=1), "JPEG"),
    file_of(image_of(64, 20, seed=2, mode="L"), "WEBP"),
]


@pytest.fixture(scope="module", params=VISION)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model of each family."""
    name = request.param
    return write_processor(name, make_vision_model(name, tmp_path_factory.mktemp("vision") / name))


@pytest.fixture(scope="module")
def child(folder: Path) -> Iterator[EncodingChild]:
    """Yield a started child, which the tests may kill."""
    child = EncodingChild(TowerSettings(str(folder), "float32", "cpu"), _LIMITS)
    child.start()
    try:
        yield child
    finally:
        child.close()


@torch.inference_mode()
def by_transformers(folder: Path, data: bytes) -> EncodedImage:
    """Encode a file with the whole model and its own processor."""
    network: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    image = decode(data)
    inputs = AutoImageProcessor.from_pretrained(folder, backend="pil")(image, return_tensors="pt")
    inputs.pop("num_crops", None)
    rows = torch.cat([part.flatten(0, -2) for part in network.get_image_features(**inputs).pooler_output])
    vision = read_vision(folder)
    assert vision is not None
    return EncodedImage(vision.family.tokens(*image.size), rows.numpy().tobytes())


@pytest.mark.parametrize("data", _FILES, ids=["png", "jpeg", "webp"])
def test_embeddings_are_those_of_transformers(folder: Path, child: EncodingChild, data: bytes) -> None:
    assert child.encode(data) == by_transformers(folder, data)


def test_a_broken_file_is_refused_and_the_next_is_encoded(child: EncodingChild) -> None:
    pid = child.pid
    for bad in (b"", b"not an image", _FILES[0][:60]):
        with pytest.raises(InvalidRequest):
            child.encode(bad)

    assert child.encode(_FILES[0]).values
    assert child.pid == pid


def test_a_killed_child_is_replaced_and_its_file_encoded(child: EncodingChild) -> None:
    before = child.encode(_FILES[0])
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)

    assert child.encode(_FILES[0]) == before


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny LLaVA."""
    return write_processor("llava", make_vision_model("llava", tmp_path_factory.mktemp("llava")))


@pytest.mark.long
def test_a_child_that_hangs_is_given_up_after_a_second_try(llava: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = EncodingChild(TowerSettings(str(llava), "float32", "cpu"), EncoderLimits(encode_s=0.5))
    start, pids = child.start, list[int]()

    def start_stopped() -> None:
        start()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGSTOP)
        pids.append(child.pid)

    monkeypatch.setattr(child, "start", start_stopped)
    try:
        with pytest.raises(DeadlineExceeded, match=r"after two tries: encoding the image took longer than 0\.5 s"):
            child.encode(_FILES[0])
    finally:
        child.close()
    assert len(set(pids)) == 2


@pytest.mark.long
def test_an_image_above_the_memory_limit_is_refused(llava: Path) -> None:
    child = EncodingChild(TowerSettings(str(llava), "float32", "cpu"), EncoderLimits(memory_bytes=64 << 20))
    try:
        with pytest.raises(InvalidRequest, match="takes more than 64 MB to encode, the limit"):
            child.encode(file_of(image_of(6000, 6000)))

        assert child.encode(_FILES[0]).values
    finally:
        child.close()


def test_a_folder_without_a_whole_tower_is_a_config_error(llava: Path, tmp_path: Path) -> None:
    other = make_tiny_model("llama", tmp_path / "llama")
    config = json.loads((llava / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config))
    write_processor("llava", other)

    child = EncodingChild(TowerSettings(str(other), "float32", "cpu"), _LIMITS)
    with pytest.raises(ConfigError, match=r"the vision tower lacks \d+ tensors"):
        child.start()
    assert child.pid is None
