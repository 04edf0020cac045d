"""One valid call of each op, as the engine makes it; by default of zeros."""

from collections.abc import Callable
from typing import Any

import torch

Arguments = tuple[list[Any], dict[str, Any]]
Make = Callable[..., torch.Tensor]
"""Makes a tensor of a shape, as torch.randn does."""


def _attention(make: Make = torch.zeros) -> Arguments:
    cache = make(6, 128, 2 * 64).bfloat16()
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    return [make(5, 4, 64).bfloat16(), cache, make(6, 128, 2 * 64).bfloat16()], {
        "atten_mask": mask, "actual_seq_lengths": [1, 5], "actual_seq_lengths_kv": [130, 40],
        "block_table": torch.tensor([[1, 2], [3, 3]], dtype=torch.int32), "num_heads": 4, "scale": 0.125,
        "input_layout": "TND", "num_key_value_heads": 2, "block_size": 128, "sparse_mode": 3,
    }  # fmt: skip


def _attention_v2(make: Make = torch.zeros) -> Arguments:
    args, kwargs = _attention(make)
    names = {
        "actual_seq_lengths": "actual_seq_qlen", "actual_seq_lengths_kv": "actual_seq_kvlen",
        "num_heads": "num_query_heads", "scale": "softmax_scale",
    }  # fmt: skip
    renamed = {names.get(name, name): value for name, value in kwargs.items()}
    return args, renamed | {"learnable_sink": make(4).bfloat16()}


def _scatter(make: Make = torch.zeros) -> Arguments:
    new, cache = (3, 2, 64), (4, 128, 2, 64)
    return [make(*new), make(*new), make(*cache), make(*cache), torch.tensor([5, 200, 7])], {"cache_mode": "Norm"}


def _norm(make: Make = torch.zeros) -> Arguments:
    return [make(3, 16), make(16), 1e-6], {}


def _add_rms_norm(make: Make = torch.zeros) -> Arguments:
    return [make(3, 16), make(3, 16), make(16), 1e-6], {}


def _gate(make: Make = torch.zeros) -> Arguments:
    return [make(3, 16)], {}


def _rotary(make: Make = torch.zeros) -> Arguments:
    return [make(1, 3, 4, 64), make(1, 3, 2, 64), make(1, 3, 1, 64), make(1, 3, 1, 64)], {"layout": "BSND"}


def _turn_one(make: Make = torch.zeros) -> Arguments:
    return [make(1, 3, 4, 16), make(1, 3, 1, 16), make(1, 3, 1, 16)], {}


RIGHT_CALLS: dict[str, Callable[..., Arguments]] = {
    "npu_fused_infer_attention_score": _attention, "npu_fused_infer_attention_score_v2": _attention_v2,
    "npu_scatter_pa_kv_cache": _scatter, "npu_rms_norm": _norm, "npu_add_rms_norm": _add_rms_norm, "npu_swiglu": _gate,
    "npu_apply_rotary_pos_emb": _rotary, "npu_rotary_mul": _turn_one,
}  # fmt: skip
