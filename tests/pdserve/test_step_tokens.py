"""The guide's rule: --max-num-batched-tokens is at least the model's length."""

import json
from pathlib import Path

import pytest

from flags.options import EngineOptions
from pdserve.step_tokens import check_step_tokens
from wire.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    return str(tmp_path)


def test_a_step_below_the_length_given_is_refused_with_both_numbers(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens 1024 is below --max-model-len 2048"):
        check_step_tokens(EngineOptions(model=folder, max_model_len=2048, max_num_batched_tokens=1024))


def test_a_step_below_the_models_length_is_refused_with_both(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"1024 is below the model's maximum length 4096"):
        check_step_tokens(EngineOptions(model=folder, max_num_batched_tokens=1024))


@pytest.mark.parametrize(("step", "length"), [(None, None), (None, 128), (4096, None), (128, 128)])
def test_a_step_as_large_as_the_length_is_accepted(folder: str, step: int | None, length: int | None) -> None:
    check_step_tokens(EngineOptions(model=folder, max_model_len=length, max_num_batched_tokens=step))
