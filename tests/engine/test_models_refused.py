"""Models that cannot be served are refused by name and with a message, before any weight is read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.loader import load_model
from engine.oracle import Oracle
from tests.engine.refused_families import REFUSED
from tests.engine.step_runner import generate
from tests.engine.tiny_families import make_family, tiny_config
from wire.errors import ConfigError


def _config_alone(kind: str, folder: Path, **settings: Any) -> Path:
    """Save the config, and as weights one tensor of no model."""
    tiny_config(kind, **settings).save_pretrained(folder)
    save_file({"nothing": torch.zeros(1)}, folder / "model.safetensors")
    return folder


def _load(path: Path) -> Any:
    return load_model(path, dtype="float32", block_size=16, kv_cache_memory=1 << 20, num_threads=1).model


@pytest.mark.parametrize("kind", REFUSED)
def test_it_is_refused_by_name_before_weights_are_read(kind: str, tmp_path: Path) -> None:
    words, settings = REFUSED[kind]

    with pytest.raises(ConfigError, match=rf"/config-alone: (model type )?{kind}:? .*{words}"):
        _load(_config_alone(kind, tmp_path / "config-alone", **settings))


def test_wrong_or_missing_weights_are_refused_by_name(tmp_path: Path) -> None:
    tiny_config("rwkv").save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")

    with pytest.raises(ConfigError, match="rwkv is a state-space or recurrent model"):
        _load(tmp_path)


def test_a_model_with_own_code_is_refused_by_its_type(tmp_path: Path) -> None:
    config = {"model_type": "rwkv5", "auto_map": {"AutoModelForCausalLM": "modeling_rwkv5.Rwkv5ForCausalLM"}}
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(ConfigError, match=r"model type rwkv5 is not supported by transformers [\d.]+; code"):
        _load(tmp_path)


def test_positions_counted_along_a_steps_rows_are_refused(tmp_path: Path) -> None:
    layers = ["full_attention"] * 4
    path = _config_alone("llama4_text", tmp_path, layer_types=layers, attn_temperature_tuning=True)

    with pytest.raises(ConfigError, match=r"llama4_text: its layers count the rows of a step \(arange\) as positions"):
        _load(path)


def test_a_supported_model_is_refused_only_for_missing_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing keys"):
        _load(_config_alone("llama", tmp_path))


def test_a_window_longer_than_any_sequence_is_ignored(tmp_path: Path) -> None:
    path = make_family("phimoe", tmp_path, sliding_window=512)

    assert generate(_load(path), [[7, 8, 9]], 4, chunk=16) == Oracle(path, "float32").generate_greedy([[7, 8, 9]], 4)
