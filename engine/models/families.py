"""The model families with a record; a causal model of transformers without one runs too, unless a check refuses it.

To add one: its record here, a row in tests/engine/tiny_families.py and one in docs/models.md.
"""

from engine.models.sharding_roles import COLUMN, EXPERTS, HEADS, INTERLEAVED_EXPERTS, NORM_OVER_HEADS, ROW
from engine.models.support import GgufFormat, ImageSupport, ModelSupport

_QKV = dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), COLUMN)
_NORMED = {
    **_QKV, "self_attn.o_proj": ROW, "self_attn.q_norm": NORM_OVER_HEADS, "self_attn.k_norm": NORM_OVER_HEADS,
}  # fmt: skip
_LATENT = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj"), COLUMN),
    "self_attn.o_proj": ROW,
    **dict.fromkeys(("self_attn.q_a_proj", "self_attn.q_a_layernorm"), "replicate"),
    **dict.fromkeys(("self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm"), "replicate"),
}
_KV_HEADS, _ALIBI = "num_key_value_heads", "ALiBi, a bias by distance, in attention code of its own"

FAMILIES = (
    ModelSupport(
        "llama", is_tested=True, kv_heads_key=_KV_HEADS, fused_layer="LlamaDecoderLayer",
        gguf=GgufFormat("LlamaForCausalLM", pairs_neighbours=True),  # Mistral's files use it too
    ),
    ModelSupport("mistral", is_tested=True, kv_heads_key=_KV_HEADS, fused_layer="MistralDecoderLayer"),
    ModelSupport(
        "qwen2", is_tested=True, kv_heads_key=_KV_HEADS, fused_layer="Qwen2DecoderLayer",
        gguf=GgufFormat("Qwen2ForCausalLM", biases=("attn_q", "attn_k", "attn_v")),
    ),
    ModelSupport(
        "qwen3", is_tested=True, kv_heads_key=_KV_HEADS, needs_head_dim=True, fused_layer="Qwen3DecoderLayer",
        gguf=GgufFormat("Qwen3ForCausalLM", norms=("attn_q_norm", "attn_k_norm")),
    ),
    ModelSupport("gemma", is_tested=True),
    ModelSupport("gemma2", is_tested=True),
    ModelSupport("gemma3_text", is_tested=True),
    ModelSupport("phi3", is_tested=True, drops_kv_past_short_length=True),
    ModelSupport(
        "gpt_oss", is_tested=True,
        sharding={
            **_QKV, "self_attn.o_proj": ROW, "self_attn.sinks": HEADS, "mlp.experts": EXPERTS,
            "mlp.experts.gate_up_proj": INTERLEAVED_EXPERTS,
        },
    ),
    ModelSupport("mixtral", is_tested=True),
    ModelSupport("qwen2_moe", is_tested=True),
    ModelSupport("qwen3_moe", is_tested=True),
    ModelSupport("olmo2", is_tested=True, sharding=_NORMED),
    ModelSupport("starcoder2", is_tested=True),
    ModelSupport("gpt_neox", is_tested=True, sharding={"attention.query_key_value": HEADS}),
    ModelSupport("gpt2", is_tested=True, has_gpt2_tokenizer=True),
    ModelSupport(
        "opt", is_tested=True, kv_heads_key="num_attention_heads", has_gpt2_tokenizer=True,
        sharding={**_QKV, "self_attn.out_proj": ROW, "fc1": COLUMN, "fc2": ROW},
    ),
    ModelSupport("granite", is_tested=True),
    ModelSupport("cohere", is_tested=True),
    ModelSupport("cohere2", is_tested=True),
    ModelSupport("deepseek_v2", is_tested=True, sharding=_LATENT),
    ModelSupport("deepseek_v3", is_tested=True, sharding=_LATENT),
    ModelSupport("glm", is_tested=True),
    ModelSupport("glm4", is_tested=True),
    ModelSupport("smollm3", is_tested=True),
    ModelSupport("llava", images=ImageSupport()),
    *(
        ModelSupport(name, images=ImageSupport("qwen2", has_grid_positions=True)) for name in ("qwen2_vl", "qwen2_5_vl")
    ),
    ModelSupport("gemma3", images=ImageSupport(attends_within=True)),
    *(ModelSupport(name, sharding=_NORMED) for name in ("olmo3", "olmoe", "flex_olmo", "minimax_m2")),
    *(ModelSupport(name, sharding=_LATENT) for name in ("axk1", "glm4_moe_lite", "minicpm3", "youtu")),
    *(ModelSupport(name, own_attention=_ALIBI) for name in ("bloom", "mpt")),
    *(ModelSupport(name, is_audio=True) for name in ("moshi", "musicgen", "musicgen_melody", "whisper")),
)  # fmt: skip
_BY_TYPE = {one.model_type: one for one in FAMILIES}


def support_of(model_type: str) -> ModelSupport:
    """Return the record of a model type; for a type without one, the defaults."""
    return _BY_TYPE.get(model_type) or ModelSupport(model_type)
