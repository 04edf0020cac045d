"""A valid call of each op passes, and a call with one wrong argument is refused."""

import pytest
import torch

from tests.npu.ops import NpuOps
from tests.npu.right_calls import RIGHT_CALLS
from tests.npu.rules import Refused

_FIA, _FIA2, _SCATTER = list(RIGHT_CALLS)[:3]
_LEFT_OUT = object()


@pytest.mark.parametrize("op", RIGHT_CALLS)
def test_a_valid_call_passes(npu_ops: NpuOps, op: str) -> None:
    args, kwargs = RIGHT_CALLS[op]()

    getattr(torch.ops.npu, op)(*args, **kwargs)

    assert npu_ops.names() == [op]


@pytest.mark.parametrize(
    ("op", "place", "value", "message"),
    [
        (_FIA, "num_query_heads", 4, "Unknown keyword argument|unexpected keyword"),
        (_FIA, "actual_seq_kvlen", [1], "Unknown keyword argument|unexpected keyword"),
        (_FIA, "actual_seq_lengths", [1, 4], "end at 4, the query has 5 rows"),
        (_FIA, "actual_seq_lengths", [4, 1], "are not cumulative lengths"),
        (_FIA, "actual_seq_lengths", _LEFT_OUT, "TND needs the lengths of the queries"),
        (_FIA, "actual_seq_lengths", torch.tensor([1, 5]), "is Tensor: a list of ints on the host"),
        (_FIA, "actual_seq_lengths_kv", torch.tensor([130, 40]), "is Tensor: a list of ints on the host"),
        (_FIA, "actual_seq_lengths_kv", _LEFT_OUT, "no reference without block_table and the lengths of the keys"),
        (_FIA, "actual_seq_lengths_kv", [130, 40, 1], "3 lengths of keys for a batch of 2"),
        (_FIA, "actual_seq_lengths_kv", [130, 300], "block_table has 2 columns, 300 keys need 3"),
        (_FIA, "block_table", torch.tensor([[1, 2], [3, 3]]), "block_table is torch.int64"),
        (_FIA, "block_table", torch.zeros(3, 2, dtype=torch.int32), "for a batch of 2"),
        (_FIA, "block_size", 64, "block_size 64 for a cache of 128 a block"),
        (_FIA, "input_layout", "BSH", r"query is \[5, 4, 64\]|lengths"),
        (_FIA, "input_layout", "BNSD", r"queryDims\(3\) must be 4|no reference for layout 'BNSD'"),
        (_FIA, "atten_mask", torch.zeros(2048, 2048, dtype=torch.bool), "not 1 above the diagonal"),
        (_FIA, "atten_mask", torch.ones(128, 128, dtype=torch.bool).triu(1), r"must be \[2048, 2048\]"),
        (_FIA, "atten_mask", torch.ones(2048, 2048).triu(1), "mask is torch.float32"),
        (_FIA, "atten_mask", _LEFT_OUT, "sparse_mode 3 needs its mask"),
        (_FIA, "sparse_mode", 4, "a band of 2147483647, 2147483647"),
        (_FIA, "sparse_mode", 0, "TND takes no mask of its own"),
        (_FIA, "num_key_value_heads", 3, "4 heads over 3"),
        (_FIA, 0, torch.zeros(5, 4, 64), "query is torch.float32"),
        (_FIA, 0, torch.zeros(5, 4, 64, dtype=torch.float16), "key is torch.bfloat16"),
        (_FIA, 0, torch.zeros(4, 5, 64, dtype=torch.bfloat16).transpose(0, 1), "query is not contiguous"),
        (_FIA, 0, torch.zeros(5, 4, 32, dtype=torch.bfloat16), r"query is \[5, 4, 32\]: must be \[5, 4, 64\]"),
        (_FIA, 1, torch.zeros(6, 128, 2, 64, dtype=torch.bfloat16), "the cache has 4 dimensions"),
        (_FIA, 2, torch.zeros(6, 128, 2 * 32, dtype=torch.bfloat16), r"value is \[6, 128, 64\]"),
        (_FIA2, "num_heads", 4, "Unknown keyword argument|unexpected keyword"),
        (_FIA2, "learnable_sink", torch.zeros(4), "learnable_sink is torch.float32"),
        (_FIA2, "learnable_sink", torch.zeros(3, dtype=torch.bfloat16), r"learnable_sink is \[3\]"),
        (_SCATTER, "cache_mode", _LEFT_OUT, "cache_mode 'PA_NZ' is for a cache in NZ format"),
        (_SCATTER, 4, torch.tensor([5, 512, 7]), r"slot_mapping leaves \[0, 512\)"),
        (_SCATTER, 4, torch.tensor([5, 5, 7]), "slot_mapping names a slot twice"),
        (_SCATTER, 4, torch.tensor([5.0, 6.0, 7.0]), "slot_mapping is torch.float32"),
        (_SCATTER, 4, torch.tensor([5, 6]), r"slot_mapping is \[2\]"),
        (_SCATTER, 0, torch.zeros(3, 2, 64).bfloat16(), "value is torch.float32"),
        (_SCATTER, 0, torch.zeros(2, 3, 64).transpose(0, 1), "key is not contiguous"),
        (_SCATTER, 2, torch.zeros(4 * 128, 2, 64), "key_cache has 3 dimensions"),
        (_SCATTER, 2, torch.zeros(4, 2, 128, 64), "key_cache is"),
        ("npu_rms_norm", 1, torch.ones(16).bfloat16(), "gamma is torch.bfloat16"),
        ("npu_rms_norm", 1, torch.ones(8), r"gamma is \[8\]"),
        ("npu_add_rms_norm", 1, torch.ones(4, 16), r"x2 is \[4, 16\]"),
        ("npu_swiglu", 0, torch.ones(3, 15), "15 columns: must be even"),
        ("npu_apply_rotary_pos_emb", "layout", "BSH", "layout 'BSH'"),
        ("npu_apply_rotary_pos_emb", 2, torch.ones(1, 3, 64), "cos is"),
        ("npu_apply_rotary_pos_emb", 0, torch.ones(1, 3, 4, 16), "the last dimension is 16: 64 or 128"),
        ("npu_apply_rotary_pos_emb", 2, torch.ones(1, 3, 1, 64).half(), "cos is torch.float16"),
        ("npu_rotary_mul", 0, torch.ones(3, 4, 16), "3, 4, 4 dimensions"),
        ("npu_rotary_mul", "rotary_mode", "interleave", "rotary_mode 'interleave'"),
        ("npu_rotary_mul", 1, torch.ones(1, 2, 1, 16), "r1"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("npu_ops")
def test_a_call_with_one_wrong_argument_is_refused(op: str, place: str | int, value: object, message: str) -> None:
    args, kwargs = RIGHT_CALLS[op]()
    if isinstance(place, int):
        args[place] = value
    elif value is _LEFT_OUT:
        del kwargs[place]
    else:
        kwargs[place] = value

    with pytest.raises((Refused, RuntimeError, TypeError), match=message):
        getattr(torch.ops.npu, op)(*args, **kwargs)


def test_blocks_of_16_are_allowed_for_single_rows_only(npu_ops: NpuOps) -> None:
    args, kwargs = RIGHT_CALLS[_FIA]()
    small = torch.zeros(60, 16, 128, dtype=torch.bfloat16)
    kwargs |= {"block_size": 16, "block_table": torch.zeros(2, 9, dtype=torch.int32)}
    single = {"actual_seq_lengths": [1, 2]}

    with pytest.raises(Refused, match="block_size 16: a multiple of 128"):
        torch.ops.npu.npu_fused_infer_attention_score(args[0], small, small, **kwargs)
    torch.ops.npu.npu_fused_infer_attention_score(args[0][:2], small, small, **(kwargs | single))


@pytest.mark.parametrize("dim", [16, 80, 96, 112, 192, 256])
@pytest.mark.usefixtures("npu_ops")
def test_tnd_has_two_head_dims(dim: int) -> None:
    _, kwargs = RIGHT_CALLS[_FIA]()
    query, cache = torch.zeros(5, 4, dim).bfloat16(), torch.zeros(6, 128, 2 * dim).bfloat16()

    with pytest.raises(Refused, match=f"head_dim {dim} under TND: 64 or 128"):
        torch.ops.npu.npu_fused_infer_attention_score(query, cache, cache, **kwargs)


@pytest.mark.usefixtures("npu_ops")
def test_bsh_has_no_band_for_single_rows() -> None:
    (_, key, value), kwargs = RIGHT_CALLS[_FIA]()
    query = torch.zeros(2, 1, 4 * 64).bfloat16()
    kwargs |= {"input_layout": "BSH", "actual_seq_lengths": [1, 1]}
    kwargs |= {"sparse_mode": 4, "pre_tokens": 20, "next_tokens": 0}

    with pytest.raises(Refused, match="a band has no meaning for single queries"):
        torch.ops.npu.npu_fused_infer_attention_score(query, key, value, **kwargs)
