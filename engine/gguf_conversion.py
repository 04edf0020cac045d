"""A GGUF file of the Llama architecture and a byte-level BPE tokenizer -> a bfloat16 checkpoint folder."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from engine.gguf_tokenizer import write_tokenizer
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


def convert(gguf_file: Path, target: Path) -> None:
    """Write config, weights, tokenizer and chat template of `gguf_file` into the new folder `target`."""
    reader = gguf.GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _check(fields)
    target.mkdir()
    weights = dict(_dequantised(tensor, fields) for tensor in reader.tensors)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)  # the library makes it private, unlike the other files
    _write_json(target / "config.json", _config(fields, tied="lm_head.weight" not in weights))
    _write_json(target / "generation_config.json", _special_ids(fields))
    write_tokenizer(fields, target)


def _check(fields: dict[str, Any]) -> None:
    architecture = fields["general.architecture"]
    kind = (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"])
    if architecture != "llama" or kind != ("gpt2", "smollm"):
        raise ConfigError(f"this GGUF is {architecture} with tokenizer {'/'.join(kind)}, not llama with gpt2/smollm")


def _dequantised(tensor: Any, fields: dict[str, Any]) -> tuple[str, torch.Tensor]:
    """Return the checkpoint's name of `tensor` and its values."""
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    if tensor.name in _TOP_NAMES:
        name = _TOP_NAMES[tensor.name]
    else:
        _, layer, part, _ = tensor.name.split(".")
        name = f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
        if part in heads:
            values = _halves_apart(values, heads[part])
    return name, torch.from_numpy(np.array(values)).to(torch.bfloat16)


def _halves_apart(values: Any, num_heads: int) -> Any:
    """Undo GGUF's order of rotary rows: it pairs neighbours (0, 1), (2, 3), ...; checkpoints pair the two halves."""
    rows, columns = values.shape
    return values.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "dtype": "bfloat16",
        "head_dim": fields["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "tie_word_embeddings": tied,
        "vocab_size": fields["llama.vocab_size"],
        **_special_ids(fields),
    }


def _special_ids(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
