"""Models that cannot be served are refused by name and in words, before any weight is read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.loader import load_model
from engine.oracle import Oracle
from tests.engine.step_runner import generate
from tests.engine.tiny_families import make_family, tiny_config
from wire.errors import ConfigError

_REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("layers of type linear_attention, which keep a recurrent state", {}),
    "mamba2": ("layers of type linear_attention, which keep a recurrent state", {"num_heads": 8}),
    "jamba": ("layers of type linear_attention, which keep a recurrent state", {}),
    "recurrent_gemma": ("layers of type linear_attention, which keep a recurrent state", {}),
    "qwen3_next": ("layers of type linear_attention, which keep a recurrent state", {}),
    "zamba2": (
        "layers of type hybrid, linear_attention, which keep a recurrent state",
        {"layer_types": ["linear_attention", "hybrid"] * 2},
    ),
    "falcon_h1": ("layers of type hybrid, which keep a recurrent state", {}),
    "rwkv": ("is a state-space or recurrent model", {}),
    "lfm2": ("layers of type conv, which keep the last inputs", {"layer_types": ["conv", "full_attention"] * 2}),
    "llama4_text": ("layers of type chunked_attention, which attend within chunks", {}),
    "deepseek_v32": ("layers of type indexed_attention, which choose their keys", {"num_key_value_heads": 4}),
    "bart": ("is an encoder-decoder model; only decoders run", {}),
    "gemma3": (r"is a model of more than text \(it has vision_config\); only text models run", {}),
    "mllama": (r"is a model of more than text \(it has vision_config\); only text models run", {}),
    "phi4_multimodal": (r"is a model of more than text \(it has audio_config, vision_config\)", {}),
    "moshi": ("is a model of sound; only text models run", {}),
    "bloom": ("has ALiBi, a bias by distance, in attention code of its own", {}),
    "mpt": ("has ALiBi, a bias by distance, in attention code of its own", {}),
    "falcon": ("has attention code of its own; only models of transformers' attention interface run", {}),
    "stablelm": ("has attention code of its own; only models of transformers' attention interface run", {}),
    "bert": ("BertSelfAttention attends in both directions", {}),
    "diffllama": ("layer 0 attends twice in one pass", {}),
    "hrm_text": ("layer 0 attends twice in one pass", {}),
    "doge": ("layer 0 masks neither the future alone nor a sliding window", {}),
    "phimoe": ("layer 0 asks its attention for a window of any length and masks one of 12", {}),
    "xmod": ("cannot run on token ids and positions alone: Input language unknown", {}),
    "llava": ("is not a causal language model", {}),
}


def _config_alone(kind: str, folder: Path, **settings: Any) -> Path:
    """Save the config, and as weights one tensor of no model."""
    tiny_config(kind, **settings).save_pretrained(folder)
    save_file({"nothing": torch.zeros(1)}, folder / "model.safetensors")
    return folder


def _load(path: Path) -> Any:
    return load_model(path, dtype="float32", block_size=16, kv_cache_memory=1 << 20, num_threads=1).model


@pytest.mark.parametrize("kind", _REFUSED)
def test_it_is_refused_by_name_before_weights_are_read(kind: str, tmp_path: Path) -> None:
    words, settings = _REFUSED[kind]

    with pytest.raises(ConfigError, match=rf"/config-alone: (model type )?{kind}:? .*{words}"):
        _load(_config_alone(kind, tmp_path / "config-alone", **settings))


def test_a_model_that_can_be_served_is_missed_only_its_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing keys"):
        _load(_config_alone("llama", tmp_path))


def test_a_masked_window_that_no_sequence_reaches_is_no_window(tmp_path: Path) -> None:
    path = make_family("phimoe", tmp_path, sliding_window=512)

    assert generate(_load(path), [[7, 8, 9]], 4, chunk=16) == Oracle(path, "float32").generate_greedy([[7, 8, 9]], 4)
