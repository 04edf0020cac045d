"""One model's paged attention: writes each layer's new KV into the pool, tells who waits for it, and attends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.attention.interface import AttentionBackend, AttentionOptions, StepAttention
from engine.step_metadata import StepMetadata

_MAX_SLICE_COPIES = 4


@dataclass(frozen=True, slots=True)
class LayerPool:
    """One layer's KV tensors: [num_blocks * block_size, heads, dim]."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Step:
    metadata: StepMetadata
    attention: StepAttention
    layer_done: Callable[[int], None] | None


class PagedAttention:
    """Owns the step in progress; `begin` and `end` bracket one forward pass on the engine's thread."""

    def __init__(self, pools: Sequence[LayerPool], backend: AttentionBackend) -> None:
        self._pools = tuple(pools)
        self._backend = backend
        self._step: _Step | None = None

    def begin(self, metadata: StepMetadata, layer_done: Callable[[int], None] | None) -> None:
        """Start a step: the layers that run until `end` belong to it."""
        self._step = _Step(metadata, self._backend.plan(metadata), layer_done)

    def end(self) -> None:
        """Forget the step."""
        self._step = None

    def run_layer(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Write the layer's KV, report it, and return [num_tokens, num_heads, value_dim].

        `query`, `key` and `value` are [heads, num_tokens, dim].
        """
        step, pool = self._step, self._pools[layer]
        assert step is not None, "a layer ran outside begin and end"
        _write(pool.keys, key, step.metadata)
        _write(pool.values, value, step.metadata)
        if step.layer_done is not None:
            step.layer_done(layer)
        return step.attention.attend(query, pool.keys, pool.values, options)


def _write(pool: torch.Tensor, new: torch.Tensor, metadata: StepMetadata) -> None:
    """Copy `new` [heads, num_tokens, dim] to the step's slots: by slices when they are few, else by index."""
    rows = new.transpose(0, 1)  # [num_tokens, heads, dim]
    if len(metadata.slot_runs) > _MAX_SLICE_COPIES:
        pool.index_copy_(0, metadata.slots, rows.to(pool.dtype))
        return
    for run in metadata.slot_runs:
        pool[run.slot : run.slot + run.count].copy_(rows[run.row : run.row + run.count])
