"""Writes a model and its tokenizer as a GGUF file, the way llama.cpp's converter lays it out."""

from pathlib import Path
from typing import Any

import gguf
import torch

CHAT_TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(file: Path, network: Any, tokens: list[str], merges: list[str]) -> None:
    """Write a Llama `network` in float32; `tokens` start with SPECIAL."""
    writer, config = gguf.GGUFWriter(file, "llama"), network.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, tokens, merges)
    for name, values in network.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        writer.add_tensor(_gguf_name(name), (values if heads is None else _interleaved(values, heads)).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, tokens: list[str], merges: list[str]) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
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
    _, _, layer, *part, _ = name.split(".")
    return f"blk.{layer}.{_NAMES['.'.join(part)]}.weight"


def _interleaved(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Row i of a head's first half goes to row 2i, row i of its second half to row 2i + 1."""
    result = torch.empty_like(values)
    dim = values.shape[0] // num_heads
    for head in range(num_heads):
        for i in range(dim // 2):
            result[head * dim + 2 * i] = values[head * dim + i]
            result[head * dim + 2 * i + 1] = values[head * dim + dim // 2 + i]
    return result
