"""CPU references of npu_fused_infer_attention_score and its v2, paged: textbook attention behind the documented rules.

A call of either is brought to one form (FiaCall), checked, and computed a sequence at a time in float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch

from tests.npu.rules import Refused, need, need_contiguous, need_dtype, need_shape, need_unused

_HALVES = (torch.float16, torch.bfloat16)
_NO_LIMIT = 2147483647
_MASK_SIZE = 2048


class Dtypes:
    """Dtypes that the op takes. No NPU has `also_float32`: with it, tests compare whole models with the oracle."""

    also_float32 = False

    @classmethod
    def allowed(cls) -> tuple[torch.dtype, ...]:
        """Return the dtypes of query, key and value."""
        return (*_HALVES, torch.float32) if cls.also_float32 else _HALVES


@dataclass(frozen=True, slots=True)
class FiaCall:
    """A call with v2's argument names; `lengths` are of queries (cumulative under TND) and of keys."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    layout: str
    q_lengths: Sequence[int] | None
    kv_lengths: Sequence[int] | None
    block_table: torch.Tensor | None
    mask: torch.Tensor | None
    sparse_mode: int
    pre_tokens: int
    next_tokens: int
    num_heads: int
    num_kv_heads: int
    scale: float
    block_size: int
    sinks: torch.Tensor | None
    wants_lse: bool


def fused_infer_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None, actual_seq_lengths_kv: Sequence[int] | None = None,
    block_table: torch.Tensor | None = None, num_heads: int = 1, scale: float = 1.0, pre_tokens: int = _NO_LIMIT,
    next_tokens: int = _NO_LIMIT, input_layout: str = "BSH", num_key_value_heads: int = 0, sparse_mode: int = 0,
    block_size: int = 0, softmax_lse_flag: bool = False, inner_precise: int = 0, **others: object,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """npu_fused_infer_attention_score."""
    need_unused(others)
    return _run(
        FiaCall(
            query, key, value, input_layout, actual_seq_lengths, actual_seq_lengths_kv, block_table, atten_mask,
            sparse_mode, pre_tokens, next_tokens, num_heads, num_key_value_heads or num_heads, scale, block_size, None,
            softmax_lse_flag,
        )
    )  # fmt: skip


def fused_infer_attention_v2(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, atten_mask: torch.Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None, actual_seq_kvlen: Sequence[int] | None = None,
    block_table: torch.Tensor | None = None, learnable_sink: torch.Tensor | None = None, num_query_heads: int = 1,
    num_key_value_heads: int = 0, softmax_scale: float = 1.0, pre_tokens: int = _NO_LIMIT,
    next_tokens: int = _NO_LIMIT, input_layout: str = "BSH", sparse_mode: int = 0, block_size: int = 0,
    return_softmax_lse: bool = False, inner_precise: int = 0, **others: object,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """npu_fused_infer_attention_score_v2."""
    need_unused(others)
    return _run(
        FiaCall(
            query, key, value, input_layout, actual_seq_qlen, actual_seq_kvlen, block_table, atten_mask, sparse_mode,
            pre_tokens, next_tokens, num_query_heads, num_key_value_heads or num_query_heads, softmax_scale, block_size,
            learnable_sink, return_softmax_lse,
        )
    )  # fmt: skip


def _run(call: FiaCall) -> tuple[torch.Tensor, torch.Tensor]:
    rows = _rows(call)
    table, kv_lengths = _check(call, rows)
    head_dim = call.key.shape[2] // call.num_kv_heads
    queries = call.query.reshape(-1, call.num_heads, head_dim)
    output, lse = torch.zeros_like(queries), torch.full(queries.shape[:2], float("inf"), dtype=torch.float32)
    for index, (chosen, kv_length) in enumerate(zip(rows, kv_lengths, strict=True)):
        blocks = table[index, : -(-kv_length // call.block_size)].long()
        keys, values = (
            pool[blocks].reshape(-1, call.num_kv_heads, head_dim)[:kv_length].double()
            for pool in (call.key, call.value)
        )
        hidden = _hidden(call, index, chosen.stop - chosen.start, kv_length)
        output[chosen], lse[chosen] = _attend(call, queries[chosen].double(), keys, values, hidden)
    if call.layout == "TND":
        return output, lse[..., None] if call.wants_lse else torch.zeros(0)
    batch, length, _ = call.query.shape
    lse = lse.view(batch, length, call.num_heads).transpose(1, 2)[..., None].contiguous()
    return output.view_as(call.query), lse if call.wants_lse else torch.zeros(0)


def _rows(call: FiaCall) -> list[slice]:
    """Return each sequence's rows of the queries, in order."""
    if call.layout == "TND":
        ends = call.q_lengths
        need(ends is not None and len(ends) > 0, "TND needs the lengths of the queries")
        assert ends is not None
        need(all(a <= b for a, b in pairwise([0, *ends])), f"{list(ends)} are not cumulative lengths")
        need(
            ends[-1] == call.query.shape[0], f"{list(ends)} end at {ends[-1]}, the query has {call.query.shape[0]} rows"
        )
        return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    if call.layout == "BSH":
        need(call.query.dim() == 3, f"query has {call.query.dim()} dimensions under BSH: 3")
        batch, length = call.query.shape[:2]
        counts = [length] * batch if call.q_lengths is None or length == 1 else list(call.q_lengths)
        counts = counts * batch if len(counts) == 1 else counts
        need(len(counts) == batch, f"{len(counts)} lengths of queries for a batch of {batch}")
        need(all(0 <= count <= length for count in counts), f"lengths {counts} of queries of {length} rows")
        return [slice(i * length, i * length + count) for i, count in enumerate(counts)]
    raise Refused(f"no reference for layout {call.layout!r}")


def _check(call: FiaCall, rows: Sequence[slice]) -> tuple[torch.Tensor, Sequence[int]]:
    """Refuse what the documents forbid; return the block table and each sequence's keys."""
    query, key, value, table = call.query, call.key, call.value, call.block_table
    need_contiguous(query=query, key=key, value=value, mask=call.mask, block_table=table)
    need_dtype(Dtypes.allowed(), query=query)
    need_dtype((query.dtype,), key=key, value=value)
    if table is None or call.kv_lengths is None:
        raise Refused("no reference without block_table and the lengths of the keys")
    need(key.dim() == 3, f"the cache has {key.dim()} dimensions: [num_blocks, block_size, heads * dim]")
    need_shape("value", value, key.shape)
    need(key.shape[1] == call.block_size, f"block_size {call.block_size} for a cache of {key.shape[1]} a block")
    need(max(key.numel(), value.numel()) < 2**31, f"a cache of {key.numel()} elements: below 2**31")
    _check_heads(call, key.shape[2])
    longest = max(chosen.stop - chosen.start for chosen in rows)
    step = 16 if longest == 1 else 128
    need(
        0 < call.block_size <= 512 and call.block_size % step == 0,
        f"block_size {call.block_size}: a multiple of {step} up to 512",
    )
    kv_lengths = list(call.kv_lengths) * (len(rows) if len(call.kv_lengths) == 1 else 1)
    need(len(kv_lengths) == len(rows), f"{len(kv_lengths)} lengths of keys for a batch of {len(rows)}")
    need_dtype((torch.int32,), block_table=table)
    need(
        table.dim() == 2 and table.shape[0] == len(rows), f"block_table {list(table.shape)} for a batch of {len(rows)}"
    )
    needed = -(-max(kv_lengths) // call.block_size)
    need(table.shape[1] >= needed, f"block_table has {table.shape[1]} columns, {max(kv_lengths)} keys need {needed}")
    _check_mask(call, rows, kv_lengths, longest)
    return table, kv_lengths


def _check_heads(call: FiaCall, hidden: int) -> None:
    heads, kv_heads = call.num_heads, call.num_kv_heads
    need(heads % kv_heads == 0 and heads // kv_heads <= 64, f"{heads} heads over {kv_heads}: a whole number up to 64")
    need(heads <= 256, f"{heads} heads: up to 256")
    need(hidden % kv_heads == 0 and hidden <= 65535, f"{hidden} columns of {kv_heads} heads: up to 65535")
    dim = hidden // kv_heads
    need(dim % 16 == 0 and dim <= 512, f"head_dim {dim}: a multiple of 16, up to 512")
    if call.layout == "TND":
        need_shape("query", call.query, [call.query.shape[0], heads, dim])
        need(call.query.shape[0] <= 65536, f"{call.query.shape[0]} rows: up to 65536")
        # CheckInputShapeWhenLayoutIsTND of prompt_flash_attention_tiling.cpp (CANN's ops-transformer)
        need(dim in (64, 128) or Dtypes.also_float32, f"head_dim {dim} under TND: 64 or 128")
        need_dtype(Dtypes.allowed()[1:], query=call.query)  # no float16
    else:
        need_shape("query", call.query, [*call.query.shape[:2], heads * dim])
        need(heads * dim <= 65535, f"{heads} heads of {dim}: up to 65535 columns")
    if call.sinks is not None:
        need(call.layout == "TND", "learnable_sink needs TND")
        need_dtype((torch.bfloat16,), learnable_sink=call.sinks)
        need_shape("learnable_sink", call.sinks, [heads])


def _check_mask(call: FiaCall, rows: Sequence[slice], kv_lengths: Sequence[int], longest: int) -> None:
    mask, table = call.mask, call.block_table
    assert table is not None
    need_dtype((torch.bool, torch.int8, torch.uint8), mask=mask)
    need(call.sparse_mode in (0, 3, 4), f"no reference for sparse_mode {call.sparse_mode}")
    if call.sparse_mode == 0:
        if mask is None:
            return
        need(call.layout != "TND", "TND takes no mask of its own under sparse_mode 0")
        need(longest == 1, "no reference for a whole mask of more than one query")
        columns = table.shape[1] * call.block_size
        need_shape("mask", mask, [len(rows), 1, 1, max(mask.shape[-1], columns)])
        return
    if mask is None:
        raise Refused(f"sparse_mode {call.sparse_mode} needs its mask of {_MASK_SIZE} x {_MASK_SIZE}")
    need_shape("mask", mask, [_MASK_SIZE, _MASK_SIZE])
    need(torch.equal(mask.bool(), _triangle()), "the mask is not 1 above the diagonal and 0 elsewhere")
    for chosen, kv_length in zip(rows, kv_lengths, strict=True):
        count = chosen.stop - chosen.start
        need(count <= kv_length, f"{count} queries of {kv_length} keys")
    if call.sparse_mode == 4:
        # TND is computed by prompt_flash_attention whatever the rows (IsUsingIFA of
        # fused_infer_attention_score_tiling.cpp), single rows under BSH by incre_flash_attention
        need(call.layout == "TND" or longest > 1, "a band has no meaning for single queries: pre_tokens is ignored")
        need(call.pre_tokens >= 0 and call.next_tokens == 0, f"a band of {call.pre_tokens}, {call.next_tokens}")


@cache
def _triangle() -> torch.Tensor:
    return torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.bool).triu(1)


def _hidden(call: FiaCall, index: int, count: int, kv_length: int) -> torch.Tensor:
    """Return [count, kv_length] bool: the keys hidden from each query. Both triangles start at the last key."""
    if call.sparse_mode == 0:
        if call.mask is None:
            return torch.zeros(count, kv_length, dtype=torch.bool)
        return call.mask[index, 0, :, :kv_length].bool()
    diagonal = kv_length - count
    ones = torch.ones(count, kv_length, dtype=torch.bool)
    hidden = ones.triu(diagonal + 1)
    return hidden if call.sparse_mode == 3 else hidden | ones.tril(diagonal - call.pre_tokens - 1)


def _attend(
    call: FiaCall, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [count, num_heads, dim] and the log of the sum of exponents, [count, num_heads]."""
    group = call.num_heads // call.num_kv_heads
    keys, values = (kv.repeat_interleave(group, dim=1).transpose(0, 1) for kv in (keys, values))
    scores = query.transpose(0, 1) @ keys.transpose(1, 2) * call.scale  # [num_heads, count, kv_length]
    scores = scores.masked_fill(hidden, float("-inf"))
    if call.sinks is not None:
        column = call.sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    output = (weights @ values).transpose(0, 1)
    return output.to(call.query.dtype), scores.logsumexp(-1).transpose(0, 1).float()
