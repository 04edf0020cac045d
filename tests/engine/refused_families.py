"""Model types that are refused: the message, and what their config needs beside the sizes of tiny_families.py."""

from typing import Any

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
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
    "llama4_text": ("layers of type chunked_attention, which attend within fixed chunks", {}),
    "deepseek_v32": ("layers of type indexed_attention, which choose their keys", {"num_key_value_heads": 4}),
    "bart": ("is an encoder-decoder model; only decoder-only models run", {}),
    "mllama": (
        r"is a multimodal model \(it has vision_config\); of these only llava, qwen2_vl, qwen2_5_vl, gemma3 run",
        {},
    ),
    "phi4_multimodal": (r"is a multimodal model \(it has audio_config, vision_config\)", {}),
    "moshi": ("is an audio model; only models of text and images run", {}),
    "bloom": ("has ALiBi, a bias by distance, in attention code of its own", {}),
    "mpt": ("has ALiBi, a bias by distance, in attention code of its own", {}),
    "falcon": ("has attention code of its own; only models that use transformers' attention interface run", {}),
    "stablelm": ("has attention code of its own; only models that use transformers' attention interface run", {}),
    "bert": ("BertSelfAttention attends in both directions", {}),
    "diffllama": ("layer 0 attends twice in one pass", {}),
    "hrm_text": ("layer 0 attends twice in one pass", {}),
    "doge": ("layer 0 uses a mask that is neither causal nor a sliding window", {}),
    "phimoe": ("layer 0 calls attention with no window, but its mask has a window of 12", {}),
    "xmod": ("cannot run from token ids and positions only: Input language unknown", {}),
    "llava_next": ("is not a causal language model", {}),
}
