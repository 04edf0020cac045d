"""The encoding process over a real tower: a bad file, a crash or a stop ends nothing else."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.vision.encoded_image import EncoderLimits
from engine.vision.encoding_child import EncodingChild, TowerSettings
from engine.vision.tower import VisionTower
from tests.engine.tiny_models import make_tiny_model
from tests.engine.tiny_vision_models import make_vision_model
from tests.images.image_files import file_of, image_of
from tests.images.tiny_processors import write_processor
from wire.errors import ConfigError, DeadlineExceeded, InvalidRequest

pytestmark = pytest.mark.long  # tests/instance/test_images.py starts one every time

_LIMITS = EncoderLimits()
_FILE = file_of(image_of(30, 20))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny LLaVA."""
    return write_processor("llava", make_vision_model("llava", tmp_path_factory.mktemp("llava")))


@pytest.fixture(scope="module")
def child(llava: Path) -> Iterator[EncodingChild]:
    """Yield a started child, which the tests may kill."""
    child = EncodingChild(TowerSettings(str(llava), "float32", "cpu"), _LIMITS)
    child.start()
    try:
        yield child
    finally:
        child.close()


def test_the_child_returns_what_the_tower_does(llava: Path, child: EncodingChild) -> None:
    tower = VisionTower(llava, "float32", "cpu")

    assert child.encode(_FILE) == tower.encode(_FILE)
    assert child.tower_bytes == tower.num_bytes


def test_a_broken_file_is_refused_and_the_next_is_encoded(child: EncodingChild) -> None:
    pid = child.pid
    for bad in (b"", b"not an image", _FILE[:60]):
        with pytest.raises(InvalidRequest):
            child.encode(bad)

    assert child.encode(_FILE).values
    assert child.pid == pid


def test_a_killed_child_is_replaced_and_its_file_encoded(child: EncodingChild) -> None:
    before = child.encode(_FILE)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)

    assert child.encode(_FILE) == before


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
        with pytest.raises(DeadlineExceeded, match=r"after two tries: encoding the image took longer than the limit"):
            child.encode(_FILE)
    finally:
        child.close()
    assert len(set(pids)) == 2


def test_an_image_above_the_memory_limit_is_refused(llava: Path) -> None:
    child = EncodingChild(TowerSettings(str(llava), "float32", "cpu"), EncoderLimits(memory_bytes=64 << 20))
    try:
        with pytest.raises(InvalidRequest, match="encoding the image takes more memory than the limit of 64 MiB"):
            child.encode(file_of(image_of(6000, 6000)))

        assert child.encode(_FILE).values
    finally:
        child.close()


def test_a_folder_without_a_whole_tower_is_a_config_error(llava: Path, tmp_path: Path) -> None:
    other = make_tiny_model("llama", tmp_path / "llama")
    config = json.loads((llava / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config))
    write_processor("llava", other)

    child = EncodingChild(TowerSettings(str(other), "float32", "cpu"), _LIMITS)
    with pytest.raises(ConfigError, match=r"the vision tower lacks tensors \(\d+\)"):
        child.start()
    assert child.pid is None
