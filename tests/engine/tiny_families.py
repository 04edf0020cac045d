"""A tiny random model of every family that transformers runs through its attention interface, with hard cases in it.

make_family("gemma2", folder)    # names: NAMED, OTHERS and VARIANTS

Windows are shorter than the prompts of the tests, biases and sinks are not zero, and embeddings are small beside what
the layers add, so that tokens depend on more than the last one.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.engine.tiny_models import MAX_MODEL_LEN, SLIDING_WINDOW, VOCAB_SIZE, saved_files, write_files

_LAYERS = 4
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "hidden_size": 64, "n_embd": 64, "intermediate_size": 96, "n_inner": 96, "ffn_dim": 96, "dff": 96,
    "num_hidden_layers": _LAYERS, "n_layer": _LAYERS, "num_attention_heads": 4, "n_head": 4, "num_key_value_heads": 2,
    "head_dim": 16, "query_pre_attn_scalar": 16, "word_embed_proj_dim": 64,
    "max_position_embeddings": MAX_MODEL_LEN, "n_positions": MAX_MODEL_LEN, "sliding_window": SLIDING_WINDOW,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_k": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48,
    "n_shared_experts": 1, "num_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
_MLA: dict[str, Any] = {"num_key_value_heads": 4}  # latent attention expands to keys and values of all heads
_ALTERNATING = ["sliding_attention", "full_attention"] * (_LAYERS // 2)
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 128,
}
NAMED: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 2},
    "gemma": {},
    "gemma2": {"layer_types": _ALTERNATING, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"layer_types": _ALTERNATING},
    "phi3": {"partial_rotary_factor": 0.5},
    "gpt_oss": {"layer_types": _ALTERNATING},
    "mixtral": {},
    "qwen2_moe": {"decoder_sparse_step": 2},
    "qwen3_moe": {},
    "olmo2": {},
    "starcoder2": {},
    "gpt_neox": {},
    "gpt2": {},
    "opt": {},
    "granite": {},
    "cohere": {},
    "cohere2": {"layer_types": _ALTERNATING},
    "deepseek_v2": _MLA,
    "deepseek_v3": {**_MLA, "rope_parameters": _YARN},
    "glm": {},
    "glm4": {},
    "smollm3": {"no_rope_layer_interval": 2},
}
"""Run by every test run: model type to what its config adds."""

OTHERS: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "apertus": {},
    "arcee": {},
    "aria_text": {},
    "axk1": _MLA,
    "beam": {},
    "bitnet": {},
    "cohere2_moe": {},
    "cwm": {},
    "dots1": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": {},
    "exaone_moe": {},
    "flex_olmo": {},
    "flint": {},
    "gemma3n_text": {
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 16,
        "layer_types": _ALTERNATING,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 16,
        "layer_types": _ALTERNATING,
        "num_kv_shared_layers": 2,
    },
    "gemma4_unified_text": {},
    "glm4_moe": {},
    "glm4_moe_lite": _MLA,
    "gpt_bigcode": {},
    "granite_swa": {"layer_types": _ALTERNATING},
    "granitemoe": {},
    "granitemoe_swa": {"layer_types": _ALTERNATING},
    "granitemoehybrid": {"layer_types": ["attention"] * _LAYERS},
    "granitemoeshared": {},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hyperclovax": {},
    "jais2": {},
    "jetmoe": {},
    "kolibri1": {},
    "laguna": {},
    "lfm2": {"layer_types": ["full_attention"] * _LAYERS},
    "lfm2_moe": {"layer_types": ["full_attention"] * _LAYERS},
    "llama4_text": {"layer_types": ["full_attention"] * _LAYERS, "attn_temperature_tuning": False},
    "mellum": {},
    "mimo_v2_flash": {},
    "minicpm3": _MLA,
    "minimax": {"layer_types": ["full_attention"] * _LAYERS},
    "minimax_m2": {},
    "minimax_m3_vl_text": {},
    "ministral": {},
    "ministral3": {},
    "modernbert-decoder": {},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo3": {},
    "olmoe": {},
    "persimmon": {},
    "phi": {},
    "phimoe": {"sliding_window": None},
    "seed_oss": {},
    "solar_open": {},
    "vaultgemma": {},
    "youtu": _MLA,
}
"""Run by `scripts/test --all`."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere-normed": ("cohere", {"use_qk_norm": True, "logit_scale": 0.25}),
    "deepseek_v3-whole_queries": ("deepseek_v3", {**_MLA, "q_lora_rank": None, "norm_topk_prob": False}),
    "gemma2-capped": ("gemma2", {"final_logit_softcapping": 3.0}),
    "gpt2-scaled": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    "gpt_neox-serial": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "granite-multiplied": (
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1, "logits_scaling": 4.0},
    ),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-yarn": ("llama", {"rope_parameters": _YARN}),
    "ministral3-scaled": (
        "ministral3",
        {"rope_parameters": _YARN | {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5}},
    ),
    "mixtral-full": ("mixtral", {"sliding_window": None}),
    "opt-post_norm": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 48}),
    "qwen3_moe-mixed": ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": True, "decoder_sparse_step": 2}),
}
"""Other configs of these: a name to the model type and what its config adds to NAMED or OTHERS."""


def make_family(model_type: str, directory: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Save a random model of the type in `directory` with tokenizer and chat template; return `directory`.

    `model_type` may be a name of VARIANTS. `changes` go to its config on top of these tables. Raises KeyError for a
    type that stands in none.
    """
    kind, variant = VARIANTS.get(model_type, (model_type, {}))
    return save_random({**NAMED, **OTHERS}[kind] | variant | changes, kind, directory, seed)


def save_random(settings: dict[str, Any], model_type: str, directory: Path, seed: int = 0) -> Path:
    """Save a random model of any type that has a causal language model, at the sizes of this file and `settings`."""
    return write_files(_files(json.dumps(settings), model_type, seed), directory)


@functools.lru_cache(maxsize=32)
def _files(settings: str, model_type: str, seed: int) -> Mapping[str, bytes]:
    config = tiny_config(model_type, **json.loads(settings))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        randomise(network)
    return saved_files(network)


def tiny_config(model_type: str, **settings: Any) -> Any:
    """Return transformers' config of the type: those of our sizes that it knows, and `settings`."""
    config_class = CONFIG_MAPPING[model_type]
    known = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    return config_class(**{name: value for name, value in _SIZES.items() if name in known} | settings)


@torch.no_grad()
def randomise(network: Any) -> None:
    """Fill the network with random weights."""
    for parameter in network.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.15)
        else:  # norms, biases, sinks
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    network.get_input_embeddings().weight.mul_(0.2)
