"""Stands in for flashinfer on the CPU: the same classes, arguments and rules, and textbook attention as the answer.

Rules are those that flashinfer-python 0.7.2 states or checks; a call that breaks one raises, as a wrong plan would be
found on a GPU only by its numbers. In graph mode the plan is copied to the caller's buffers and read from there.
"""

import math
from typing import Any, ClassVar

import torch

Made = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""An output [rows, heads, dim]; with return_lse also the base-2 logarithms of the softmax's sums, [rows, heads]."""

MIN_WORKSPACE = 1 << 20
"""Bytes; the real ones use 128 MiB."""
_DTYPES = (torch.float16, torch.bfloat16)


def _int32(name: str, tensor: torch.Tensor, length: int | None = None) -> torch.Tensor:
    if tensor.dtype != torch.int32 or tensor.dim() != 1 or (length is not None and len(tensor) != length):
        raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)}, int32 [{length}] wanted")
    return tensor


class _Wrapper:
    """What both wrappers share."""

    made: ClassVar[list[Any]] = []

    def __init__(self, workspace: torch.Tensor) -> None:
        if workspace.dtype != torch.uint8 or workspace.numel() < MIN_WORKSPACE:
            raise ValueError("a workspace of bytes")
        self.num_plans = 0
        self.arguments: dict[str, Any] = {}
        _Wrapper.made.append(self)

    def _take(
        self, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, *, sm_scale: float | None, window_left: int, logits_soft_cap: float | None,
        q_data_type: str | torch.dtype, kv_data_type: torch.dtype | None,
    ) -> None:  # fmt: skip
        _int32("indptr", indptr)
        if indptr.device.type != "cpu" or int(indptr[0]) != 0 or bool((indptr.diff() < 1).any()):
            raise ValueError("indptr: on the CPU, from 0, a page or more each")
        _int32("indices", indices, int(indptr[-1]))
        _int32("last_page_len", last, len(indptr) - 1)
        if bool((last < 1).any()) or bool((last > page_size).any()):
            raise ValueError(f"last_page_len {last.tolist()}: from 1 to {page_size}")
        if q_data_type not in _DTYPES or kv_data_type != q_data_type or head_dim not in (64, 128, 256):
            raise ValueError(f"no kernel of {q_data_type}, {kv_data_type}, {head_dim}")
        if num_qo_heads % num_kv_heads or window_left < -1:
            raise ValueError("heads or window")
        self.num_plans += 1
        self.arguments = {
            "heads": num_qo_heads, "kv_heads": num_kv_heads, "dim": head_dim, "page_size": page_size,
            "scale": sm_scale if sm_scale is not None else head_dim**-0.5, "window_left": window_left,
            "softcap": logits_soft_cap or 0.0, "dtype": q_data_type,
        }  # fmt: skip
        self.indptr, self.indices, self.last = indptr.clone(), indices.clone(), last.clone()

    def _attend(
        self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], ends: torch.Tensor, return_lse: bool
    ) -> Made:
        plan, (keys, values) = self.arguments, cache
        pages = (plan["page_size"], plan["kv_heads"], plan["dim"])
        if q.shape != (int(ends[-1]), plan["heads"], plan["dim"]) or not q.is_contiguous():
            raise ValueError(f"q {list(q.shape)} for {ends.tolist()} and {plan}")
        if keys.shape[1:] != pages or values.shape != keys.shape:
            raise ValueError(f"pages {list(keys.shape)}, {list(values.shape)}, not {pages}")
        if {q.dtype, keys.dtype, values.dtype} != {plan["dtype"]}:
            raise ValueError("a dtype that was not planned")
        bounds = zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        parts = [self._attend_one(n, q[start:end], keys, values) for n, (start, end) in enumerate(bounds)]
        out, lse = (torch.cat(made) for made in zip(*parts, strict=True))
        return (out, lse) if return_lse else out

    def _attend_one(
        self, number: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        plan = self.arguments
        own = self.indices[int(self.indptr[number]) : int(self.indptr[number + 1])].long()
        length = (len(own) - 1) * plan["page_size"] + int(self.last[number])
        group = plan["heads"] // plan["kv_heads"]
        k, v = (cache[own].flatten(0, 1)[:length].double().repeat_interleave(group, 1) for cache in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * plan["scale"]
        if plan["softcap"]:
            scores = plan["softcap"] * torch.tanh(scores / plan["softcap"])
        at = torch.arange(length - len(q), length)[:, None]
        key = torch.arange(length)[None]
        hidden = key > at
        if plan["window_left"] >= 0:
            hidden = hidden | (key < at - plan["window_left"])
        scores = scores.masked_fill(hidden, float("-inf"))
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)
        return out, (scores.logsumexp(-1).t() / math.log(2)).float()


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """One query a sequence."""

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        use_tensor_cores: bool = False, paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None, paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto", jit_args: list[Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(float_workspace_buffer)
        if kv_layout != "NHD":
            raise ValueError(kv_layout)
        self.use_cuda_graph, self.use_tensor_cores = use_cuda_graph, use_tensor_cores
        self._buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        if use_cuda_graph:
            for buffer in self._buffers:
                assert buffer is not None
                _int32("buffer", buffer)

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, *, window_left: int = -1,
        logits_soft_cap: float | None = None, q_data_type: str | torch.dtype = "float16",
        kv_data_type: torch.dtype | None = None, sm_scale: float | None = None,
    ) -> None:  # fmt: skip
        self._take(
            indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, window_left=window_left,
            logits_soft_cap=logits_soft_cap, q_data_type=q_data_type, kv_data_type=kv_data_type, sm_scale=sm_scale,
        )  # fmt: skip
        if not self.use_cuda_graph:
            return
        starts, pages, last = self._buffers
        assert starts is not None
        assert pages is not None
        assert last is not None
        if len(last_page_len) != len(last) or len(indices) > len(pages):
            raise ValueError(f"{len(last_page_len)} rows of {len(last)}, {len(indices)} pages of {len(pages)}")
        starts.copy_(self.indptr)
        pages[: len(indices)] = indices
        last.copy_(self.last)
        self.indptr, self.indices, self.last = starts, pages, last

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, return_lse: bool = False
    ) -> Made:
        return self._attend(q, paged_kv_cache, torch.arange(len(self.last) + 1), return_lse)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Any number of queries a sequence, at its end."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        super().__init__(float_workspace_buffer)
        if kv_layout != "NHD":
            raise ValueError(kv_layout)
        self._ends = torch.empty(0)

    def plan(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int,
        *, causal: bool = False, sm_scale: float | None = None, window_left: int = -1,
        logits_soft_cap: float | None = None, q_data_type: str | torch.dtype = "float16",
        kv_data_type: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        if not causal:
            raise ValueError("not causal")
        self._ends = _int32("qo_indptr", qo_indptr, len(paged_kv_indptr)).clone()
        self._take(
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim_qk,
            page_size, window_left=window_left, logits_soft_cap=logits_soft_cap, q_data_type=q_data_type,
            kv_data_type=kv_data_type, sm_scale=sm_scale,
        )  # fmt: skip

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, return_lse: bool = False
    ) -> Made:
        return self._attend(q, paged_kv_cache, self._ends, return_lse)
