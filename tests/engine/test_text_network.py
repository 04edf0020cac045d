"""The text network of published vision checkpoints: tensor names of every age, configs as published."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from engine.checkpoints.checkpoint import open_checkpoint
from engine.checkpoints.text_network import image_support, text_network_config, text_weights
from engine.loader import load_model
from tests.engine.tiny_vision_models import VISION, make_vision_model

_LLAVA = {
    "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": 32000,
    "text_config": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "torch_dtype": "float16", "vocab_size": 32064,
    },
    "torch_dtype": "float16", "vision_config": {"model_type": "clip_vision_model", "image_size": 336},
}  # fmt: skip
_QWEN = {
    "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "hidden_size": 1536,
    "intermediate_size": 8960, "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2,
    "max_position_embeddings": 32768, "rope_theta": 1000000.0, "tie_word_embeddings": True, "vocab_size": 151936,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "torch_dtype": "bfloat16",
    "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 1536},
}  # fmt: skip
_QWEN25 = _QWEN | {"model_type": "qwen2_5_vl", "vision_config": {"depth": 32, "out_hidden_size": 1536}}
_GEMMA = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "mm_tokens_per_image": 256,
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16", "vision_config": {"model_type": "siglip_vision_model", "image_size": 896},
}  # fmt: skip


class _Named:
    """Weights with names alone."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def shape(self, name: str) -> tuple[int, ...]:
        return (len(name),)

    dtype = read = None


def _config(values: dict[str, Any], folder: Path) -> Any:
    (folder / "config.json").write_text(json.dumps(values))
    return AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"), ("model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"), ("lm_head.weight", "lm_head.weight"),
        ("model.language_model.layers.0.self_attn.q_proj.qweight", "model.layers.0.self_attn.q_proj.qweight"),
        ("visual.blocks.0.norm1.weight", None), ("model.visual.blocks.0.norm1.weight", None),
        ("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight", None), ("model.vision_tower.x", None),
        ("multi_modal_projector.linear_1.weight", None), ("model.multi_modal_projector.linear_1.weight", None),
    ],
)  # fmt: skip
def test_tensors_have_the_names_of_a_text_model(stored: str, name: str | None) -> None:
    weights = text_weights(_Named(stored, "visual.merger.ln_q.weight"))  # type: ignore[arg-type]

    assert list(weights.names) == ([] if name is None else [name])
    assert name is None or weights.shape(name) == (len(stored),)


@pytest.mark.parametrize(
    ("values", "kind", "tied"),
    [(_LLAVA, "llama", False), (_QWEN, "qwen2", True), (_QWEN25, "qwen2", True), (_GEMMA, "gemma3_text", True)],
    ids=["llava", "qwen2_vl", "qwen2_5_vl", "gemma3"],
)  # fmt: skip
def test_a_published_config_becomes_that_of_its_text_model(
    values: dict[str, Any], kind: str, tied: bool, tmp_path: Path
) -> None:
    whole = _config(values, tmp_path)
    images = image_support(whole)
    assert images is not None

    text, own = text_network_config(whole, images), whole.get_text_config(decoder=True)

    same = ("hidden_size", "num_hidden_layers", "num_key_value_heads", "vocab_size", "max_position_embeddings")
    assert [getattr(text, name) for name in same] == [getattr(own, name) for name in same]
    assert (text.model_type, text.tie_word_embeddings, text.architectures) == (kind, tied, None)
    assert getattr(text, "layer_types", None) == getattr(own, "layer_types", None)
    rope = dict(own.rope_parameters)
    rope.pop("mrope_section", None)
    assert {key: value for key, value in text.rope_parameters.items() if key != "type"} == {
        key: value for key, value in rope.items() if key != "type"
    }


@pytest.mark.parametrize(("values", "sections"), [(_LLAVA, ()), (_QWEN, (16, 24, 24)), (_QWEN25, (16, 24, 24))])
def test_a_checkpoint_knows_the_sections_of_its_rotation(
    values: dict[str, Any], sections: tuple[int, ...], tmp_path: Path
) -> None:
    _config(values, tmp_path)
    save_file({"model.norm.weight": torch.zeros(1, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")

    checkpoint = open_checkpoint(tmp_path)

    assert checkpoint.rope_sections == sections
    assert checkpoint.images is not None
    assert checkpoint.stored_dtype == ("float16" if values is _LLAVA else "bfloat16")


def test_a_text_model_is_not_for_images() -> None:
    assert image_support(AutoConfig.for_model("llama")) is None


@pytest.mark.often("llava", "qwen2_vl")
@pytest.mark.parametrize("name", VISION)
def test_the_tower_is_not_read(name: str, tmp_path: Path) -> None:
    path = make_vision_model(name, tmp_path / name)
    network = load_model(path, dtype="float32", block_size=16, kv_cache_memory=1 << 20, num_threads=1).model._network

    assert not [key for key in network.state_dict() if "vision" in key or "visual" in key or "projector" in key]
