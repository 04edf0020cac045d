"""--generation-config and --override-generation-config."""

import json
from pathlib import Path
from typing import Any

import pytest

from scheduler.model.generation_defaults import GUIDE_DEFAULTS, read_defaults
from wire.errors import ConfigError


def write(folder: Path, **values: Any) -> str:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return str(folder)


@pytest.mark.covers("A11.7", "B.generation.1")
def test_the_guides_defaults_override_the_models(tmp_path: Path) -> None:
    folder = write(tmp_path, temperature=0.2)

    assert read_defaults(folder, "vllm", None) == read_defaults(folder, "none", None) == GUIDE_DEFAULTS


@pytest.mark.covers("A11.7", "B.generation.2")
def test_auto_uses_the_models_own_and_ignores_other_keys(tmp_path: Path) -> None:
    folder = write(tmp_path, temperature=0.2, top_k=20, do_sample=True, eos_token_id=[1, 2], top_p=None)

    assert read_defaults(folder, "auto", None) == {**GUIDE_DEFAULTS, "temperature": 0.2, "top_k": 20}


def test_a_model_without_the_file_gets_the_guides_defaults(tmp_path: Path) -> None:
    assert read_defaults(str(tmp_path), "auto", None) == GUIDE_DEFAULTS


def test_another_folder_must_have_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is missing"):
        read_defaults(str(tmp_path), str(tmp_path / "nowhere"), None)


@pytest.mark.covers("B.generation.3")
def test_an_override_wins(tmp_path: Path) -> None:
    folder = write(tmp_path, temperature=0.2, top_p=0.5)

    found = read_defaults(folder, "auto", '{"temperature": 0.9}')
    assert found == {**GUIDE_DEFAULTS, "temperature": 0.9, "top_p": 0.5}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("{", "is not JSON"), ("[]", "of type list, not an object"), ('{"temperature": 3}', "is 3, but must"),
        ('{"top_k": 1.5}', "top_k is 1.5, but must be a whole number"), ('{"top_p": true}', "top_p is True"),
    ],
)  # fmt: skip
def test_a_wrong_override_is_named(tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_defaults(str(tmp_path), "vllm", override)
