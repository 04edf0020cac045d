"""CPU references of the small ops, as torch_npu documents them: norms, gates, rotations, and writing KV."""

import torch

from tests.npu.rules import need, need_contiguous, need_dtype, need_shape, need_unused

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """npu_rms_norm: y = x / rms(x) * gamma, and 1 / rms(x). Computed in float32, rounded once."""
    need_dtype(FLOATS, x=x)
    need_dtype((x.dtype,), gamma=gamma)
    need(2 <= x.dim() <= 8, f"x has {x.dim()} dimensions: 2 to 8")
    need_shape("gamma", gamma, x.shape[x.dim() - gamma.dim() :])
    rstd = (x.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (x.float() * rstd * gamma.float()).to(x.dtype), rstd


def add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """npu_add_rms_norm: the norm of the sum, 1 / rms, and the sum."""
    need_dtype((x1.dtype,), x2=x2)
    need_shape("x2", x2, x1.shape)
    total = x1 + x2
    y, rstd = rms_norm(total, gamma, epsilon)
    return y, rstd, total


def swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """npu_swiglu: silu(A) * B of the two halves of x."""
    need_dtype(FLOATS, x=x)
    need(x.shape[dim] % 2 == 0, f"x has {x.shape[dim]} columns: must be even")
    a, b = x.float().chunk(2, dim)
    return (a * a.sigmoid() * b).to(x.dtype)


def apply_rotary_pos_emb(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    layout: str = "BSND", rotary_mode: str = "half",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """npu_apply_rotary_pos_emb on A2 and A3. In place: query and key are the results."""
    need(rotary_mode == "half", f"rotary_mode {rotary_mode!r}: half")
    need(layout in ("BSND", "TND"), f"layout {layout!r}: BSND or TND")
    need_dtype(FLOATS, query=query)
    need_dtype((query.dtype,), key=key, cos=cos, sin=sin)
    rows = list(query.shape[:-2])
    need(query.dim() == (3 if layout == "TND" else 4), f"query has {query.dim()} dimensions under {layout}")
    need(list(key.shape[:-2]) == rows, f"key {list(key.shape)} beside query {list(query.shape)}")
    dim = query.shape[-1]
    need(dim in (64, 128), f"the last dimension is {dim}: 64 or 128")
    for name, table in (("cos", cos), ("sin", sin)):
        need_shape(name, table, [*rows, 1, dim])
    for tensor in (query, key):
        tensor.copy_(_rotated_half(tensor, cos, sin))
    return query, key


def rotary_mul(
    x: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str = "half", rotate: torch.Tensor | None = None
) -> torch.Tensor:
    """npu_rotary_mul in its "half" mode, x in BNSD, BSND or SBND."""
    need_unused({"rotate": rotate})
    need(rotary_mode == "half", f"rotary_mode {rotary_mode!r}: half")
    need_dtype(FLOATS, x=x)
    need_dtype((x.dtype,), r1=r1, r2=r2)
    need(x.dim() == r1.dim() == r2.dim() == 4, f"{x.dim()}, {r1.dim()}, {r2.dim()} dimensions: 4 each")
    need(x.shape[-1] < 896 and x.shape[-1] % 2 == 0, f"the last dimension is {x.shape[-1]}: even, below 896")
    need(x.shape[0] < 1000 and min(x.shape[1:3]) < 1000, f"{list(x.shape)}: B and N below 1000")
    for name, table in (("r1", r1), ("r2", r2)):
        fits = all(have in (1, want) for have, want in zip(table.shape[:-1], x.shape[:-1], strict=True))
        need(fits and table.shape[-1] == x.shape[-1], f"{name} {list(table.shape)} for {list(x.shape)}")
    return _rotated_half(x, r1, r2)


def _rotated_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x * cos + (-x2, x1) * sin, in float32 and rounded once."""
    first, second = x.float().chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (x.float() * cos.float() + turned * sin.float()).to(x.dtype)


def scatter_pa_kv_cache(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    slot_mapping: torch.Tensor, *, compress_lens: torch.Tensor | None = None,
    compress_seq_offsets: torch.Tensor | None = None, seq_lens: torch.Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:  # fmt: skip
    """npu_scatter_pa_kv_cache into [num_blocks, block_size, heads, dim]; no reference for other layouts."""
    need_unused({"compress_lens": compress_lens, "compress_seq_offsets": compress_seq_offsets, "seq_lens": seq_lens})
    need(cache_mode in (None, "Norm"), f"cache_mode {cache_mode!r} is for a cache in NZ format: 'Norm' is for ours")
    need_contiguous(key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping)
    need_dtype(FLOATS, key=key)
    need_dtype((key.dtype,), value=value, key_cache=key_cache, value_cache=value_cache)
    need_dtype((torch.int32, torch.int64), slot_mapping=slot_mapping)
    need(key.dim() == value.dim() == 3, f"key and value have {key.dim()} and {value.dim()} dimensions: 3")
    need_shape("value", value, [*key.shape[:2], value.shape[2]])
    need_shape("slot_mapping", slot_mapping, [key.shape[0]])
    for name, cache, new in (("key_cache", key_cache, key), ("value_cache", value_cache, value)):
        need(cache.dim() == 4, f"{name} has {cache.dim()} dimensions: 4")
        need_shape(name, cache, [*cache.shape[:2], *new.shape[1:]])
        slots = cache.shape[0] * cache.shape[1]
        need(bool(((slot_mapping >= 0) & (slot_mapping < slots)).all()), f"slot_mapping leaves [0, {slots})")
        need(len(set(slot_mapping.tolist())) == len(slot_mapping), "slot_mapping names a slot twice")
        cache.view(slots, *new.shape[1:])[slot_mapping.long()] = new
