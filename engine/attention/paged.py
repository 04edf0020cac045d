"""One model's paged attention: writes each layer's new KV into the pool, reports the layer, and attends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.attention.interface import AttentionBackend, AttentionOptions, StepAttention
from engine.attention.reference import ReferenceAttention
from engine.step_metadata import StepMetadata


@dataclass(frozen=True, slots=True)
class LayerPool:
    """One layer's KV tensors: [num_blocks * block_size, heads, dim]."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Step:
    attention: StepAttention
    layer_done: Callable[[int], None] | None


class PagedAttention:
    """Owns the step in progress; `begin` and `end` bracket one forward pass on the engine's thread."""

    def __init__(self, pools: Sequence[LayerPool], backend: AttentionBackend) -> None:
        self._pools = tuple(pools)
        self._backend, self._reference = backend, ReferenceAttention()
        self._step: _Step | None = None

    def begin(self, metadata: StepMetadata, layer_done: Callable[[int], None] | None) -> None:
        """Start a step; layers that run until `end` use its metadata."""
        # only the reference lets the tokens of a span see each other
        has_spans = any(sequence.spans for sequence in metadata.sequences)
        backend = self._reference if has_spans else self._backend
        self._step = _Step(backend.plan(metadata), layer_done)

    def begin_fixed(self, attention: StepAttention) -> None:
        """Start a run with an attention that is already planned, as when a graph is captured."""
        self._step = _Step(attention, None)

    def end(self) -> None:
        """End the step and drop its metadata."""
        self._step = None

    def close(self) -> None:
        """Drop the pool, so that its memory can be freed: the network's layers keep a reference to this object."""
        self._pools = ()

    def run_layer(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Write the layer's KV, report it, and return [num_tokens, num_heads, value_dim].

        `query`, `key` and `value` are [heads, num_tokens, dim].
        """
        step, pool = self._step, self._pools[layer]
        assert step is not None, "a layer ran outside begin and end"
        step.attention.write(pool.keys, pool.values, key, value)
        if step.layer_done is not None:
            step.layer_done(layer)
        return step.attention.attend(query, pool.keys, pool.values, options)
