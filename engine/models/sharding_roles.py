"""The roles of a network's modules and parameters split over several ranks; some names are transformers'."""

COLUMN, ROW = "colwise", "rowwise"
FUSED_QKV, FUSED_GATE_UP = "fused_qkv", "fused_gate_up"
HEADS = "heads"
"""A fused projection whose rows are ordered by head, or a vector with one number per head."""
NORM_OVER_HEADS = "norm_over_heads"
EXPERTS = "moe_tp_experts"
INTERLEAVED_EXPERTS = "interleaved_experts"
"""Experts with interleaved gate and up, weights as [experts, inputs, outputs], and biases."""
WHOLE = ("replicated_with_grad_allreduce", "replicate", "embedding_rowwise", "embedding_colwise")
KNOWN = (
    *WHOLE, COLUMN, ROW, "packed_colwise", EXPERTS, INTERLEAVED_EXPERTS, FUSED_QKV, FUSED_GATE_UP, HEADS,
    NORM_OVER_HEADS,
)  # fmt: skip
