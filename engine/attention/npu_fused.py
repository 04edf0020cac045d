"""Calls of npu_fused_infer_attention_score over a paged pool, and its limits.

layout | rows of the step                          | limits                             | source
TND    | any sequences, concatenated               | bfloat16, head dim 64 or 128       | CheckInputShapeWhenLayoutIsTND
BSH    | single rows together, or one chunk alone  | float16 too, head dim up to 512    | the op's document

Lengths are lists on the host, one per sequence for keys, cumulative for TND's queries. Chunks of any size use one mask,
the 2048 x 2048 triangle, aligned to the last key (sparse_mode 3, or 4 with a band); single rows under BSH, which has no
bands for them, use no mask or one of their own. The op's document is _op_plugin_docs.py in torch_npu's wheel. The check
named for TND is a function in prompt_flash_attention_tiling.cpp of CANN's ops-transformer; it accepts TND over blocks
with these limits and, unlike the document, with bands for single rows. An older CANN refuses TND over blocks: then BSH
computes everything (backend_choice.py).
"""

from dataclasses import dataclass

import torch

from engine.attention.interface import AttentionOptions
from engine.attention.npu_rows import StepRows
from engine.attention.sinks import apply_sinks

DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
"""Supported dtypes of query and pool."""
TND_DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16,)
TND_DIMS: tuple[int, ...] = (64, 128)
_TND_ROWS, _TND_SEQUENCES = 65_536, 4_096
_MAX_HEADS, _MAX_GROUP, _MAX_DIM, _DIM_STEP, _MAX_COLUMNS = 256, 64, 512, 16, 65_535
_BLOCK_STEP, _MAX_BLOCK, _MAX_ELEMENTS = 128, 512, 2**31 - 1
_TRIANGLE = 2048
_CAUSAL, _BAND = 3, 4


@dataclass(frozen=True, slots=True)
class LayerRows:
    """One layer of a step: its query rows, and its part of the pool, which already has their keys and values."""

    query: torch.Tensor  # [num_tokens, num_heads, dim]
    keys: torch.Tensor  # [num_slots, num_kv_heads, dim], as are the values
    values: torch.Tensor
    options: AttentionOptions
    block_size: int

    def cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values in the op's layout: [num_blocks, block_size, num_kv_heads * dim] each."""
        keys, values = (
            pool.view(-1, self.block_size, pool.shape[1] * pool.shape[2]) for pool in (self.keys, self.values)
        )
        return keys, values


def why_not(layer: LayerRows) -> str | None:
    """Return why the op does not support this layer, or None if it does."""
    query, keys, values = layer.query, layer.keys, layer.values
    heads, kv_heads, dim = query.shape[1], keys.shape[1], keys.shape[2]
    if layer.options.softcap is not None:
        return f"the op has no softcap, but the layer's is {layer.options.softcap:g}"
    if query.dtype not in DTYPES or keys.dtype != query.dtype:
        return f"queries of {query.dtype} and keys of {keys.dtype}: both must have one dtype of {_names(DTYPES)}"
    if keys.shape != values.shape:
        return f"head dims {dim} of keys and {values.shape[2]} of values: the op requires equal ones"
    if dim % _DIM_STEP or dim > _MAX_DIM:
        return f"head dim {dim}: the op supports multiples of {_DIM_STEP} up to {_MAX_DIM}"
    if heads > _MAX_HEADS or heads > kv_heads * _MAX_GROUP:
        limits = f"at most {_MAX_HEADS} query heads, and {_MAX_GROUP} for each KV head"
        return f"query heads {heads}, KV heads {kv_heads}: the op supports {limits}"
    if heads * dim > _MAX_COLUMNS:
        return f"{heads} heads with head dim {dim}: the op supports at most {_MAX_COLUMNS} columns"
    if layer.block_size % _BLOCK_STEP or layer.block_size > _MAX_BLOCK:
        return f"block size {layer.block_size}: the op supports multiples of {_BLOCK_STEP} up to {_MAX_BLOCK}"
    if keys.numel() > _MAX_ELEMENTS:
        return f"a pool of {keys.numel()} numbers per tensor: the op supports at most {_MAX_ELEMENTS}"
    return None


def takes_tnd(layer: LayerRows, num_sequences: int) -> bool:
    """Return whether one TND call may compute a layer that the op supports."""
    num_tokens, _, dim = layer.query.shape
    small = num_tokens <= _TND_ROWS and num_sequences <= _TND_SEQUENCES
    return small and dim in TND_DIMS and layer.query.dtype in TND_DTYPES


def triangle(device: torch.device) -> torch.Tensor:
    """Return the mask for chunks of any size: [2048, 2048] bool, true where a key is hidden."""
    return torch.ones(_TRIANGLE, _TRIANGLE, dtype=torch.bool, device=device).triu(1)


def attend_together(layer: LayerRows, rows: StepRows, mask: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return [rows, num_heads, dim] by TND. `mask` is the triangle."""
    if layer.options.sinks is not None:
        return _attend_with_sinks(layer, rows, mask, window)
    keys, values = layer.cache()
    made: tuple[torch.Tensor, torch.Tensor] = torch.ops.npu.npu_fused_infer_attention_score(
        rows.of(layer.query), keys, values, atten_mask=mask, actual_seq_lengths=rows.query_ends,
        actual_seq_lengths_kv=rows.kv_lengths, block_table=rows.table, num_heads=layer.query.shape[1],
        scale=layer.options.scaling, input_layout="TND", num_key_value_heads=layer.keys.shape[1],
        block_size=layer.block_size, **_band(window),
    )  # fmt: skip
    return made[0]


def attend_alone(layer: LayerRows, rows: StepRows, mask: torch.Tensor | None, window: int | None) -> torch.Tensor:
    """Return [rows, num_heads, dim] by BSH, of single rows or of one chunk.

    `mask` is the triangle for a chunk; for single rows [rows, 1, 1, keys] bool, true where a key is outside the
    window, or None.
    """
    keys, values = layer.cache()
    is_chunk = rows.is_one_chunk
    query = rows.of(layer.query)
    made: tuple[torch.Tensor, torch.Tensor] = torch.ops.npu.npu_fused_infer_attention_score(
        query.flatten(1).unsqueeze(0 if is_chunk else 1), keys, values, atten_mask=mask,
        actual_seq_lengths=[query.shape[0]] if is_chunk else [1] * query.shape[0],
        actual_seq_lengths_kv=rows.kv_lengths, block_table=rows.table, num_heads=query.shape[1],
        scale=layer.options.scaling, input_layout="BSH", num_key_value_heads=layer.keys.shape[1],
        block_size=layer.block_size, softmax_lse_flag=layer.options.sinks is not None,
        **(_band(window) if is_chunk else {}),
    )  # fmt: skip
    output = made[0].view_as(query)
    if layer.options.sinks is None:
        return output
    lse = made[1].squeeze(-1).transpose(1, 2).flatten(0, 1)  # from [batch, num_heads, rows per sequence, 1]
    return apply_sinks(output, lse, layer.options.sinks)


def _attend_with_sinks(layer: LayerRows, rows: StepRows, mask: torch.Tensor, window: int | None) -> torch.Tensor:
    """Attend by v2 of the op, which takes sinks in bfloat16 and has other argument names."""
    assert layer.options.sinks is not None
    keys, values = layer.cache()
    made: tuple[torch.Tensor, torch.Tensor] = torch.ops.npu.npu_fused_infer_attention_score_v2(
        rows.of(layer.query), keys, values, atten_mask=mask, actual_seq_qlen=rows.query_ends,
        actual_seq_kvlen=rows.kv_lengths, block_table=rows.table, learnable_sink=layer.options.sinks.to(torch.bfloat16),
        num_query_heads=layer.query.shape[1], num_key_value_heads=layer.keys.shape[1],
        softmax_scale=layer.options.scaling, input_layout="TND", block_size=layer.block_size, **_band(window),
    )  # fmt: skip
    return made[0]


def _band(window: int | None) -> dict[str, int]:
    """Return the options for the triangle. The band's number of tokens before a query does not count the query."""
    if window is None:
        return {"sparse_mode": _CAUSAL}
    return {"sparse_mode": _BAND, "pre_tokens": window - 1, "next_tokens": 0}


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
