"""The weights a loader reads: those stored, or dequantised ones with a word of what that costs."""

from dataclasses import dataclass

import torch

from engine.quantization.interface import Layout
from engine.quantization.weights import DequantisingWeights
from engine.weights import Weights

_GIB = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class PlainWeights:
    """Weights without quantisation; `note` warns of the memory, None where they were plain all along."""

    weights: Weights
    note: str | None = None


def plain_weights(stored: Weights, layout: Layout | None, dtype: str) -> PlainWeights:
    """Return `stored`, dequantised to `dtype` where it has a layout. Raises ConfigError for tensors that do not fit."""
    if layout is None:
        return PlainWeights(stored)
    weights = DequantisingWeights(stored, layout, getattr(torch, dtype))
    inputs = "; inputs are not quantised" if layout.rounds_inputs else ""
    return PlainWeights(
        weights,
        f"warning: {layout.name} weights are dequantised to {dtype} at load, as there is no kernel for them here: "
        f"{_size(weights.stored_bytes)} stored take {_size(weights.held_bytes)} of memory{inputs}",
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.1f} MiB"
