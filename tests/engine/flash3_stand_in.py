"""Stands in for flash_attn_with_kvcache of FlashAttention 3 on the CPU, over blocks: textbook attention as the answer.

The parameters are those of hopper/flash_attn_interface.py (flash-attention, commit 0251105a), as far as the engine uses
them. A call that breaks a rule of mha_fwd in hopper/flash_api.cpp raises; each check has the condition of one there.
"""

from typing import Any

import torch

calls: list[dict[str, Any]] = []
"""Arguments of the calls since it was last cleared."""


class Refused(RuntimeError):
    """A call that the kernel's checks do not allow."""


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, cache_seqlens: torch.Tensor,
    page_table: torch.Tensor, cu_seqlens_q: torch.Tensor, max_seqlen_q: int | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """Return the output, [total_q, num_heads, dim]; with return_softmax_lse a tuple that begins with it and the
    natural logarithms of the softmax's sums, [num_heads, total_q].
    """
    _check(q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q)
    calls.append({"window_size": window_size, "max_seqlen_q": max_seqlen_q, "page_table": page_table})
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    right = 0 if causal else window_size[1]
    outputs, logarithms = [], []
    for number, (start, end) in enumerate(zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True)):
        length, group = int(cache_seqlens[number]), q.shape[1] // k_cache.shape[2]
        pages = page_table[number, : -(-length // k_cache.shape[1])].long()
        keys, values = (
            pool[pages].flatten(0, 1)[:length].double().repeat_interleave(group, 1) for pool in (k_cache, v_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", q[start:end].double(), keys) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        at, key = torch.arange(length - (end - start), length)[:, None], torch.arange(length)[None]
        hidden = (key > at + right) if right >= 0 else torch.zeros(1, 1, dtype=torch.bool)
        if window_size[0] >= 0:
            hidden = hidden | (key < at - window_size[0])
        scores = scores.masked_fill(hidden, float("-inf"))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype))
        logarithms.append(scores.logsumexp(-1).float())
    out, lse = torch.cat(outputs), torch.cat(logarithms, 1)
    return (out, lse, torch.empty(0), torch.empty(0)) if return_softmax_lse else out


def _check(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor,
    ends: torch.Tensor, max_query_length: int | None,
) -> None:  # fmt: skip
    num_sequences, dim = len(ends) - 1, q.shape[-1]
    for holds, words in (
        (q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only supports fp16, bf16"),
        (keys.dtype == q.dtype, "query and key must have the same dtype"),
        (values.dtype == q.dtype, "query and value must have the same dtype"),
        (q.stride(-1) == keys.stride(-1) == values.stride(-1) == 1, "must have contiguous last dimension"),
        (table.dtype == torch.int32, "page_table must have dtype torch.int32"),
        (table.stride(-1) == 1, "page_table must have contiguous last dimension"),
        (ends.dtype == torch.int32, "cu_seqlens_q must have dtype torch.int32"),
        (ends.is_contiguous(), "cu_seqlens_q must be contiguous"),
        (max_query_length is not None, "max_seqlen_q must be provided if cu_seqlens_q is provided"),
        (num_sequences == table.shape[0], "batch_size must be equal to batch_size_k"),
        (dim <= 256, "only supports head dimension at most 256"),
        (q.shape[1] % keys.shape[2] == 0, "Number of heads in key/value must divide number of heads in query"),
        (q.dim() == 3 and int(ends[-1]) == len(q), "q must have shape (total_q, num_heads, head_size)"),
        (keys.dim() == 4 and keys.shape[3] == dim, "k must have shape (num_pages, page_size, num_heads_k, head_size)"),
        (values.shape == keys.shape, "v must have shape (num_pages, page_size, num_heads_k, head_size)"),
        (lengths.dtype == torch.int32, "seqused_k must have dtype int32"),
        (lengths.shape == (num_sequences,), "seqused_k must have shape (batch_size)"),
        (dim % 8 == 0, "head_size should be a multiple of 8"),
        (
            max_query_length is None or max_query_length >= int(ends.diff().max()),
            "a query behind max_seqlen_q would not be computed",
        ),
    ):
        if not holds:
            raise Refused(words)
