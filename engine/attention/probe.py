"""Compare an attention backend with the reference on this machine: one small step in the model's own shapes.

    kind of layer --make_step--> a pool with earlier KV, new rows --backend on the device--> output
                                                                  --reference on the CPU, in float32--> output

The reference runs on the CPU, so that a device whose plain torch operations are wrong is detected too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.attention.interface import AttentionBackend, AttentionOptions
from engine.attention.reference import ReferenceAttention
from engine.step import BatchSequence, StepBatch
from engine.step_metadata import StepMetadata, build

Part = tuple[int, int]
"""(start, count): a sequence's tokens of the step, after the tokens that earlier steps wrote."""
_HOST = torch.device("cpu")
_LONG = 700
"""A version of CANN ignored masks after the 512th key (vllm-project/vllm-ascend issue 15503); shorter rows hide it."""
_WINDOW = 100
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Limit on a number's absolute difference: values are about 1, and 16-bit kernels round the softmax's weights too."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """One layer's attention parameters: heads, dims and AttentionOptions without the values of the sinks."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    def __str__(self) -> str:
        """Return a description such as "query heads 8, KV heads 2, head dim 64, window 128, sinks"."""
        is_equal = self.key_dim == self.value_dim
        dims = f"head dim {self.key_dim}" if is_equal else f"key dim {self.key_dim}, value dim {self.value_dim}"
        extras = [
            "" if self.sliding_window is None else f"window {self.sliding_window}",
            "" if self.softcap is None else f"softcap {self.softcap:g}",
            "sinks" if self.has_sinks else "",
        ]
        return ", ".join([f"query heads {self.num_heads}, KV heads {self.num_kv_heads}", dims, *filter(None, extras)])


@dataclass(frozen=True, slots=True)
class _Step:
    """One layer's inputs: pools [num_slots, num_kv_heads, dim] with earlier KV, new rows [heads, rows, dim]."""

    keys: torch.Tensor
    values: torch.Tensor
    query: torch.Tensor
    new_keys: torch.Tensor
    new_values: torch.Tensor
    options: AttentionOptions

    def to(self, device: torch.device, dtype: torch.dtype) -> "_Step":
        """Return a copy on `device` in `dtype`. Rows have a projection's layout, token by token."""

        def moved(rows: torch.Tensor) -> torch.Tensor:
            return rows.to(device, dtype, copy=True).transpose(0, 1).contiguous().transpose(0, 1)

        sinks = self.options.sinks
        return _Step(
            keys=self.keys.to(device, dtype, copy=True),
            values=self.values.to(device, dtype, copy=True),
            query=moved(self.query),
            new_keys=moved(self.new_keys),
            new_values=moved(self.new_values),
            options=replace(self.options, sinks=None if sinks is None else sinks.to(device, dtype)),
        )


def usual_parts(block_size: int) -> tuple[Part, ...]:
    """Return a step with a whole prompt, a chunk in the middle of one, and decodes, some at a block boundary."""
    size = block_size
    return ((2 * size + 3, 1), (0, size + 5), (size, 1), (max(0, size - 3), 7), (size - 1, 1), (0, 1), (_LONG, 1))


def with_short_window(kind: LayerKind) -> LayerKind:
    """Return the kind with a window that hides keys in usual_parts: to a kernel, a window is only a number."""
    window = kind.sliding_window
    return kind if window is None else replace(kind, sliding_window=min(window, _WINDOW))


def differs(
    backend: AttentionBackend, kind: LayerKind, parts: Sequence[Part], *,
    block_size: int, dtype: torch.dtype, device: torch.device, seed: int = 0,
) -> str | None:  # fmt: skip
    """Describe how `backend` differs from the reference on `device`, if it does. The backend's errors pass through."""
    step = _make_step(kind, parts, block_size, dtype, seed)
    batch = _batch(parts, block_size)
    expected_step = step.to(_HOST, torch.float32)
    expected = _run(ReferenceAttention(), build(batch, block_size=block_size, device=_HOST), expected_step)
    theirs = step.to(device, dtype)
    got = _run(backend, build(batch, block_size=block_size, device=device), theirs)
    for what, pool, wanted in (
        ("keys", theirs.keys, expected_step.keys), ("values", theirs.values, expected_step.values)
    ):  # fmt: skip
        if not torch.equal(pool.cpu().float().nan_to_num(7e7), wanted.to(dtype).float().nan_to_num(7e7)):
            return f"{kind}: the {what} in the pool are not those passed to write, or are in other slots"
    if tuple(got.shape) != tuple(expected.shape):
        return f"{kind}: the output has shape {list(got.shape)}, not {list(expected.shape)}"
    worst, allowed = float((got.cpu().float() - expected).abs().max()), _TOLERANCE[dtype]
    return None if worst <= allowed else f"{kind}: largest difference {worst:.3g}, but the limit is {allowed:g}"


@torch.inference_mode()
def _run(backend: AttentionBackend, metadata: StepMetadata, step: _Step) -> torch.Tensor:
    attention = backend.plan(metadata)
    attention.write(step.keys, step.values, step.new_keys, step.new_values)
    return attention.attend(step.query, step.keys, step.values, step.options)


def _make_step(kind: LayerKind, parts: Sequence[Part], block_size: int, dtype: torch.dtype, seed: int) -> _Step:
    """Return random inputs, rounded to `dtype`; unowned slots contain NaN, so that reading one is noticed."""
    numbers = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=numbers).to(dtype).float()

    tables, num_blocks = _tables(parts, block_size)
    rows = sum(count for _, count in parts)

    def past(dim: int) -> torch.Tensor:
        pool = torch.full((num_blocks * block_size, kind.num_kv_heads, dim), float("nan"))
        for (start, _), table in zip(parts, tables, strict=True):
            slots = [table[token // block_size] * block_size + token % block_size for token in range(start)]
            pool[slots] = some(start, kind.num_kv_heads, dim)
        return pool

    return _Step(
        keys=past(kind.key_dim),
        values=past(kind.value_dim),
        query=some(kind.num_heads, rows, kind.key_dim),
        new_keys=some(kind.num_kv_heads, rows, kind.key_dim),
        new_values=some(kind.num_kv_heads, rows, kind.value_dim),
        options=AttentionOptions(
            kind.scaling, kind.sliding_window, kind.softcap, some(kind.num_heads) if kind.has_sinks else None
        ),
    )


def _batch(parts: Sequence[Part], block_size: int) -> StepBatch:
    tables, _ = _tables(parts, block_size)
    sequences = tuple(
        BatchSequence(start, count, table) for (start, count), table in zip(parts, tables, strict=True)
    )  # fmt: skip
    return StepBatch((0,) * sum(count for _, count in parts), sequences, ())


def _tables(parts: Sequence[Part], block_size: int) -> tuple[list[list[int]], int]:
    """Assign blocks round robin, the last block first, so that no table is in order. Return tables and pool size."""
    needs = [-(-(start + count) // block_size) for start, count in parts]
    tables: list[list[int]] = [[] for _ in parts]
    free = 2 + sum(needs)  # two more than needed, owned by no sequence
    num_blocks = free
    while any(len(table) < need for table, need in zip(tables, needs, strict=True)):
        for table, need in zip(tables, needs, strict=True):
            if len(table) < need:
                free -= 1
                table.append(free)
    return tables, num_blocks
