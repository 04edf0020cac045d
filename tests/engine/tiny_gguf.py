"""Writes a model and its tokenizer as a GGUF file, the way llama.cpp's converter lays it out."""

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoModelForCausalLM

from tests.engine.tiny_models import VOCAB_SIZE, make_tiny_model

CHAT_TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_INTERLEAVED = {"llama": True, "qwen2": False, "qwen3": False}


def write_tiny_gguf(folder: Path, kind: str, **changes: Any) -> tuple[Path, Any]:
    """Write a GGUF of a tiny model, alone in a folder; return it and the network. `changes` go to write_gguf."""
    source = make_tiny_model(kind, folder / f"{kind}-source")
    network = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    pieces = json.loads((source / "tokenizer.json").read_text())["model"]
    by_id = sorted(pieces["vocab"], key=pieces["vocab"].__getitem__)
    tokens = [*by_id, *(f"<unused{i}>" for i in range(VOCAB_SIZE - len(by_id)))]
    (folder / "model").mkdir()
    file = folder / "model" / "tiny.gguf"
    write_gguf(file, network, tokens, [" ".join(pair) for pair in pieces["merges"]], **changes)
    return file, network


def write_gguf(
    file: Path,
    network: Any,
    tokens: list[str],
    merges: list[str],
    *,
    pre: str = "smollm",
    stored: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    divisors: Any | None = None,
) -> None:
    """Write a `network` of one of _INTERLEAVED, its matrices as `stored`; `tokens` start with SPECIAL."""
    writer, config = gguf.GGUFWriter(file, network.config.model_type), network.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if "head_dim" in config.to_dict():
        writer.add_key_length(config.head_dim)
    _add_tokenizer(writer, tokens, merges, pre)
    for name, values in network.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads is not None and _INTERLEAVED[config.model_type]:
            values = _interleaved(values, heads)
        kind = stored if values.dim() > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(name), gguf.quantize(values.numpy(), kind), raw_dtype=kind)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, tokens: list[str], merges: list[str], pre: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)


def _gguf_name(name: str) -> str:
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in top:
        return top[name]
    if name == "lm_head.weight":
        return "output.weight"
    _, _, layer, *part, tensor = name.split(".")
    return f"blk.{layer}.{_NAMES['.'.join(part)]}.{tensor}"


def _interleaved(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Row i of a head's first half goes to row 2i, row i of its second half to row 2i + 1."""
    result = torch.empty_like(values)
    dim = values.shape[0] // num_heads
    for head in range(num_heads):
        for i in range(dim // 2):
            result[head * dim + 2 * i] = values[head * dim + i]
            result[head * dim + 2 * i + 1] = values[head * dim + dim // 2 + i]
    return result
