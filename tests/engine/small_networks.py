"""Small random networks of transformers, and their logits with an attention that needs no KV pool."""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from engine.attention.registered import NAME, attach, register
from engine.modules.check import SumAttention

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GQA: dict[str, Any] = {**SIZES, "intermediate_size": 96, "num_key_value_heads": 2}


def network(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Return a network of this config whose norms differ from 1."""
    register()
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME).eval()
    for name, parameter in made.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 0.0 if "emma" in type(made).__name__ else 1.0, 0.2)
    return made


@torch.inference_mode()
def logits(made: Any, num_tokens: int = 23) -> torch.Tensor:
    """Return its logits for fixed tokens."""
    attach(made, SumAttention())
    ids = torch.arange(num_tokens)[None] % 64
    result: torch.Tensor = made(input_ids=ids, position_ids=torch.arange(num_tokens)[None], use_cache=False).logits
    return result.float()
