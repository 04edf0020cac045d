"""Stands in for flashinfer's norms, gates and rotations on the CPU: the same arguments and rules, plain arithmetic.

Rules are those that flashinfer-python 0.7.2 states or checks. Each computes in float32 and rounds once.
"""

import numpy as np
import torch
from torch.nn import functional


class Dtypes:
    """What rows may be of. No kernel takes float32; whole models are compared with the oracle in it."""

    also_float32 = False


calls: list[str] = []
"""Names of the calls since it was last cleared."""


def rmsnorm(
    input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """The norm of [rows, width], or of [rows, heads, width]."""
    _check_rows("rmsnorm", input, weight, dims=(2, 3))
    return _normalise(input, weight.float(), eps)


def gemma_rmsnorm(
    input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """The norm of [rows, width], one added to its weight."""
    _check_rows("gemma_rmsnorm", input, weight, dims=(2,))
    return _normalise(input, weight.float() + 1, eps)


def fused_add_rmsnorm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:  # fmt: skip
    """Add to `residual`, and put its norm into `input`."""
    _check_rows("fused_add_rmsnorm", input, residual, weight, dims=(2,))
    _add(input, residual, weight.float(), eps)


def gemma_fused_add_rmsnorm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:  # fmt: skip
    """The same, one added to the weight."""
    _check_rows("gemma_fused_add_rmsnorm", input, residual, weight, dims=(2,))
    _add(input, residual, weight.float() + 1, eps)


def silu_and_mul(
    input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:  # fmt: skip
    """silu of the first half, times the second."""
    _check_rows("silu_and_mul", input, dims=(2,))
    gate, up = _halves(input)
    return (functional.silu(gate) * up).to(input.dtype)


def gelu_tanh_and_mul(
    input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:  # fmt: skip
    """The approximated gelu of the first half, times the second."""
    _check_rows("gelu_tanh_and_mul", input, dims=(2,))
    gate, up = _halves(input)
    return (functional.gelu(gate, approximate="tanh") * up).to(input.dtype)


def gelu_and_mul(
    input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:  # fmt: skip
    """gelu of the first half, times the second."""
    _check_rows("gelu_and_mul", input, dims=(2,))
    gate, up = _halves(input)
    return (functional.gelu(gate) * up).to(input.dtype)


def apply_rope_with_cos_sin_cache(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, head_size: int, cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Turn [rows, heads * head_size] by halves; the table has a row for each position, cosines then sines."""
    _check_rows("apply_rope_with_cos_sin_cache", query, key, dims=(2,))
    if cos_sin_cache.dtype != torch.float32:
        raise ValueError("cos_sin_cache should be float32")
    if positions.dtype not in (torch.int32, torch.int64) or positions.shape != query.shape[:1] != key.shape[:1]:
        raise ValueError(f"positions {positions.dtype} {list(positions.shape)} for {list(query.shape)}")
    if not (is_neox and cos_sin_cache.is_contiguous() and cos_sin_cache.shape[1] <= head_size):
        raise ValueError("no reference for it")
    cos, sin = cos_sin_cache[positions.long()].unsqueeze(1).chunk(2, dim=-1)  # [rows, 1, half]
    turned = []
    for rows in (query, key):
        first, second = rows.view(len(rows), -1, head_size).float().chunk(2, dim=-1)
        made = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        turned.append(made.to(rows.dtype).reshape(rows.shape))
    return turned[0], turned[1]


def top_p_renorm_probs(
    probs: torch.Tensor, top_p: torch.Tensor | float, is_deterministic: bool = False
) -> torch.Tensor:  # fmt: skip
    """Zero what is below the lowest of the fewest probabilities [rows, vocab] that reach `top_p`; scale the rest."""
    if probs.dtype != torch.float32 or not probs.is_contiguous() or not probs.isfinite().all():
        raise ValueError(f"top_p_renorm_probs: {probs.dtype}, strides {probs.stride()}, or not a number")
    assert isinstance(top_p, torch.Tensor)
    if top_p.shape != probs.shape[:1] or top_p.dtype != torch.float32:
        raise ValueError(f"top_p_renorm_probs: top_p {top_p.dtype} {list(top_p.shape)} for {list(probs.shape)}")
    calls.append("top_p_renorm_probs")
    ordered = probs.sort(dim=-1, descending=True).values
    sums = np.cumsum(ordered.numpy(), axis=-1, dtype=np.float32)  # torch would add up in float64
    before = torch.from_numpy(sums) < top_p[:, None]
    last = ordered.gather(1, before.sum(dim=-1, keepdim=True).clamp(max=probs.shape[1] - 1))
    kept = probs.masked_fill(probs < last, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)


def _check_rows(name: str, *rows: torch.Tensor, dims: tuple[int, ...]) -> None:
    for one in rows:
        if one.dtype not in (torch.float16, torch.bfloat16) and not Dtypes.also_float32:
            raise ValueError(f"{name}: no kernel of {one.dtype}")
        if one.dtype != rows[0].dtype or one.stride(-1) != 1:
            raise ValueError(f"{name}: {one.dtype} beside {rows[0].dtype}, strides {one.stride()}")
    if rows[0].dim() not in dims:
        raise ValueError(f"{name}: Unsupported input dimension: {rows[0].dim()}")
    calls.append(name)


def _normalise(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = rows.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight).to(rows.dtype)


def _add(rows: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    residual.add_(rows)
    rows.copy_(_normalise(residual, weight, eps))


def _halves(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if rows.shape[-1] % 2 or not rows.is_contiguous():
        raise ValueError("The last dimension must be even (2 * hidden_size).")
    first, second = rows.float().chunk(2, dim=-1)
    return first, second
