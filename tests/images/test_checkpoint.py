"""What a folder says about images, in the files of either release of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from images.checkpoint import read_vision
from tests.images.settings import LLAVA, LLAVA_PROCESSOR
from wire.errors import ConfigError


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_text_model_needs_no_image_processor(tmp_path: Path) -> None:
    assert read_vision(write(tmp_path, config={"model_type": "llama"})) is None


def test_both_places_of_the_settings_are_read(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    old = read_vision(write(tmp_path / "old", config=LLAVA, preprocessor_config=LLAVA_PROCESSOR))
    new = read_vision(write(tmp_path / "new", config=LLAVA, processor_config={"image_processor": LLAVA_PROCESSOR}))

    assert old is not None
    assert old.family.tokens(1, 1).count == 576
    assert old == new


def test_other_settings_have_another_digest(tmp_path: Path) -> None:
    first = read_vision(write(tmp_path, config=LLAVA, preprocessor_config=LLAVA_PROCESSOR))
    second = read_vision(write(tmp_path, preprocessor_config=LLAVA_PROCESSOR | {"resample": 2}))

    assert first is not None
    assert second is not None
    assert first.settings_digest != second.settings_digest


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"text_config": {"model_type": "llama"}}, LlamaConfig().hidden_size),  # llava-1.5-7b-hf
        ({"text_config": {"model_type": "llama", "hidden_size": 5120}}, 5120),
        ({"hidden_size": 3584}, 3584),  # Qwen2-VL-7B-Instruct
        ({"text_config": {"model_type": "qwen2_vl_text", "hidden_size": 2048}, "hidden_size": 3584}, 2048),
        ({"text_config": {"model_type": "mistral"}}, None),
        ({}, None),
    ],
)
def test_the_hidden_size_is_that_of_the_text_network(tmp_path: Path, config: Any, expected: int | None) -> None:
    vision = read_vision(write(tmp_path, config=LLAVA | config, preprocessor_config=LLAVA_PROCESSOR))

    assert vision is not None
    assert vision.hidden_size == expected


def test_a_missing_processor_is_an_error_with_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no preprocessor_config\.json"):
        read_vision(write(tmp_path, config=LLAVA))


def test_a_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a JSON object"):
        read_vision(write(tmp_path, config=[]))
