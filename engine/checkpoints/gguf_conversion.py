"""Convert a GGUF file of a dense decoder to a checkpoint folder.

The families whose files are converted have a GgufFormat in engine/models/families.py.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from engine.checkpoints.gguf_rope import ROPE_TENSOR, rope_parameters
from engine.checkpoints.gguf_tokenizer import check_tokenizer, write_tokenizer
from engine.models.families import FAMILIES
from wire.errors import ConfigError

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL_IDS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
_FORMATS = {family.model_type: family.gguf for family in FAMILIES if family.gguf is not None}


def convert(gguf_file: Path, target: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config, weights in `dtype`, tokenizer and chat template of `gguf_file` into the new folder `target`.

    Raises ConfigError naming the architecture, tokenizer, tensor or rope scaling that is not supported.
    """
    reader = gguf.GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _check(fields)
    check_tokenizer(fields)
    divisors = next((tensor.data for tensor in reader.tensors if tensor.name == ROPE_TENSOR), None)
    config = _config(fields, dtype, rope_parameters(fields, divisors))
    stored = [tensor for tensor in reader.tensors if tensor.name != ROPE_TENSOR]
    names = {tensor.name: _stored_name(tensor.name, fields) for tensor in stored}
    target.mkdir()
    weights = {names[tensor.name]: _dequantised(tensor, fields, dtype) for tensor in stored}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)  # safetensors makes it readable by the owner only
    _write_json(target / "config.json", config | {"tie_word_embeddings": "lm_head.weight" not in weights})
    _write_json(target / "generation_config.json", _special_ids(fields))
    write_tokenizer(fields, target)


def stored_dtype(gguf_file: Path) -> torch.dtype:
    """Return the dtype that keeps plain matrices exact; bfloat16 where they are quantised."""
    kinds = {tensor.tensor_type for tensor in gguf.GGUFReader(gguf_file).tensors if len(tensor.shape) > 1}
    if kinds == {gguf.GGMLQuantizationType.F16}:
        return torch.float16
    return torch.float32 if kinds <= {gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16} else torch.bfloat16


def _check(fields: dict[str, Any]) -> None:
    architecture = fields["general.architecture"]
    if architecture not in _FORMATS:
        raise ConfigError(f"GGUF architecture {architecture} is not supported; supported: {', '.join(_FORMATS)}")
    if fields.get(f"{architecture}.expert_count"):
        raise ConfigError(f"this GGUF is a {architecture} mixture of experts, which is not supported")


def _stored_name(name: str, fields: dict[str, Any]) -> str:
    """Return the checkpoint's name of a tensor. Raises ConfigError for a tensor unknown in its architecture."""
    architecture = fields["general.architecture"]
    stored, (block, *place) = _FORMATS[architecture], name.split(".")
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    if block == "blk" and len(place) == 3:
        layer, part, kind = place
        known = _LAYER_NAMES | {norm: f"self_attn.{norm.removeprefix('attn_')}" for norm in stored.norms}
        if part in known and (kind == "weight" or (kind == "bias" and part in stored.biases)):
            return f"model.layers.{layer}.{known[part]}.{kind}"
    raise ConfigError(f"this GGUF has the tensor {name}, which {architecture} does not have")


def _dequantised(tensor: Any, fields: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    try:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ConfigError(f"{tensor.name} is quantised as {tensor.tensor_type.name}, which is not supported") from error
    architecture = fields["general.architecture"]
    if _FORMATS[architecture].pairs_neighbours:
        heads = fields[f"{architecture}.attention.head_count"]
        kv_heads = fields.get(f"{architecture}.attention.head_count_kv", heads)
        num_heads = {"attn_q": heads, "attn_k": kv_heads}.get(tensor.name.split(".")[-2])
        values = values if num_heads is None else _halves_apart(values, num_heads)
    return torch.from_numpy(np.array(values)).to(dtype)


def _halves_apart(values: Any, num_heads: int) -> Any:
    """Undo GGUF's order of rotary rows: GGUF pairs neighbours (0, 1), (2, 3), ...; checkpoints pair the two halves."""
    rows, columns = values.shape
    return values.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _config(fields: dict[str, Any], dtype: torch.dtype, rope: dict[str, Any]) -> dict[str, Any]:
    architecture = fields["general.architecture"]

    def value(key: str, default: Any = None) -> Any:
        found = fields.get(f"{architecture}.{key}", default)
        if found is None:
            raise ConfigError(f"this GGUF has no {architecture}.{key}")
        return found

    heads, size = value("attention.head_count"), value("embedding_length")
    return {
        "architectures": [_FORMATS[architecture].network_class],
        "model_type": architecture,
        "attention_bias": False,
        "dtype": str(dtype).removeprefix("torch."),
        "head_dim": value("attention.key_length", size // heads),
        "hidden_act": "silu",
        "hidden_size": size,
        "intermediate_size": value("feed_forward_length"),
        "max_position_embeddings": value("context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": value("block_count"),
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "rms_norm_eps": round(value("attention.layer_norm_rms_epsilon"), 12),
        "rope_parameters": rope,
        "tie_word_embeddings": True,
        "vocab_size": value("vocab_size", len(fields["tokenizer.ggml.tokens"])),
        **_special_ids(fields),
    }


def _special_ids(fields: dict[str, Any]) -> dict[str, Any]:
    found = {key: fields.get(f"tokenizer.ggml.{name}_token_id") for name, key in _SPECIAL_IDS.items()}
    return {key: value for key, value in found.items() if value is not None}


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
