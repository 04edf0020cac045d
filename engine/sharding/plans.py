"""The roles of a network's modules and parameters: from transformers' tensor-parallel plan, or ours where it has none.

Ours map the part of a name after the layer's number, for the model types that tests prove exact.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from wire.errors import ConfigError

COLUMN, ROW = "colwise", "rowwise"
FUSED_QKV, FUSED_GATE_UP = "fused_qkv", "fused_gate_up"
HEADS = "heads"
"""A fused projection whose rows are ordered by head, or a vector with one number per head."""
NORM_OVER_HEADS = "norm_over_heads"
EXPERTS = "moe_tp_experts"
INTERLEAVED_EXPERTS = "interleaved_experts"
"""Experts with interleaved gate and up, weights as [experts, inputs, outputs], and biases."""
WHOLE = ("replicated_with_grad_allreduce", "replicate", "embedding_rowwise", "embedding_colwise")
_KNOWN = (
    *WHOLE, COLUMN, ROW, "packed_colwise", EXPERTS, INTERLEAVED_EXPERTS, FUSED_QKV, FUSED_GATE_UP, HEADS,
    NORM_OVER_HEADS,
)  # fmt: skip

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
_OWN: dict[str, Mapping[str, str]] = {
    "opt": {**_QKV, "self_attn.out_proj": ROW, "fc1": COLUMN, "fc2": ROW},
    "gpt_neox": {"attention.query_key_value": HEADS},
    "gpt_oss": {
        **_QKV, "self_attn.o_proj": ROW, "self_attn.sinks": HEADS, "mlp.experts": EXPERTS,
        "mlp.experts.gate_up_proj": INTERLEAVED_EXPERTS,
    },
    **dict.fromkeys(("olmo2", "olmo3", "olmoe", "flex_olmo", "minimax_m2"), _NORMED),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "axk1", "glm4_moe_lite", "minicpm3", "youtu"), _LATENT),
}  # fmt: skip
_LAYER = r"(?:.*\.)?layers\.\d+\."


def find_roles(network: Any, kind: str) -> dict[str, str]:
    """Return the roles of modules and parameters by their paths. Raises ConfigError for unknown roles."""
    names = [name for name, _ in network.named_modules()] + [name for name, _ in network.named_parameters()]
    theirs: dict[str, str] = getattr(network, "tp_plan", None) or {}
    roles = _match(names, {re.escape(key).replace(r"\*", r"[^.]+"): role for key, role in theirs.items()})
    roles |= _match(names, {_LAYER + re.escape(key): role for key, role in _OWN.get(kind, {}).items()})
    roles |= {name: role for path, module in network.named_modules() for name, role in _fused(path, module, roles)}
    head = network.get_output_embeddings()
    heads = {name for name, module in network.named_modules() if module is head}
    for name, role in roles.items():
        if role not in _KNOWN and name not in heads:
            raise ConfigError(
                f"{kind} cannot be cut for several ranks: its tensor-parallel plan has {name} as {role}, which is not "
                f"one of {', '.join(_KNOWN)}; use --tensor-parallel-size 1"
            )
    return roles


def _match(names: list[str], plan: Mapping[str, str]) -> dict[str, str]:
    patterns = [(re.compile(pattern + "$"), role) for pattern, role in plan.items()]
    return {name: role for name in names for pattern, role in patterns if pattern.match(name)}


def _fused(path: str, module: Any, roles: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the roles of fused projections, which the plan does not cut."""
    for fused, last, role in (("qkv_proj", "o_proj", FUSED_QKV), ("gate_up_proj", "down_proj", FUSED_GATE_UP)):
        names = f"{path}.{fused}", f"{path}.{last}"
        linears = all(isinstance(getattr(module, name, None), nn.Linear) for name in (fused, last))
        if linears and [roles.get(name) for name in names] == ["colwise_gather_output", "rowwise_split_input"]:
            yield names[0], role
            yield names[1], ROW
