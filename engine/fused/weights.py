"""Weights packed for the native kernels: one memory area in huge pages (area.py), filled layer by layer.

A linear layer's own weight is freed once it is packed, so that there is no second copy; it can be unpacked again.
"""

from array import array
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from engine.fused.area import SharedWeights, own_area
from engine.fused.structs import FORMATS, PAIR, PANEL, FinishCode, Functions, Linear, Packing, address, padded
from native.engine_library import Threads

_LINE = 64


class PackedMemory:
    """Owns the memory of packed weights; pages are allocated when they are written."""

    def __init__(
        self, num_bytes: int, functions: Functions, threads: Threads, shared: SharedWeights | None = None
    ) -> None:
        """`num_bytes` is the sum of `packed_bytes` of all products; `shared` may already contain the packed weights."""
        self.area = (None if shared is None else shared.area(num_bytes)) or own_area(num_bytes)
        self._next = self.area.start
        self._end = self._next + num_bytes
        self._functions, self._threads = functions, threads
        self._kept: list[torch.Tensor] = []

    def pack(self, weights: Sequence[nn.Linear], finish: FinishCode) -> Linear:
        """Pack linear layers with the same input as one product; each starts at a new panel.

        With GATED_SILU the two layers' panels alternate. The weights must be contiguous.
        """
        first, gated = weights[0].weight, finish is FinishCode.GATED_SILU
        place = self._take(packed_bytes(weights))
        for linear, start, step in _places(weights, gated):
            columns, k = linear.weight.shape
            source = linear.weight.detach().contiguous()
            packing = Packing(place, source.data_ptr(), columns, k, start, step, FORMATS[source.dtype])
            if not self.area.is_filled:
                self._functions.pack(self._threads.address, address(packing))
        panels = sum(num_panels(linear.out_features) for linear in weights)
        bias = self._bias(weights, gated)
        n = first.shape[0] if len(weights) == 1 else panels * PANEL
        return Linear(place, bias, first.shape[1], n, FORMATS[first.dtype], finish)

    def unpack(self, product: Linear, weights: Sequence[nn.Linear]) -> None:
        """Restore, bit for bit, the freed weights of linear layers that were packed as `product`."""
        dtype = next(dtype for dtype, number in FORMATS.items() if number == product.format)
        for linear, start, step in _places(weights, product.finish == FinishCode.GATED_SILU):
            rows = torch.empty(linear.out_features, linear.in_features, dtype=torch.float32)
            columns = array("q", ((start + c // PANEL * step) * PANEL + c % PANEL for c in range(len(rows))))
            fault = self._functions.embed(
                self._threads.address, address(product), columns.buffer_info()[0], len(rows), rows.data_ptr(),
                rows.stride(0),
            )  # fmt: skip
            assert not fault, "every column was packed"
            linear.weight = nn.Parameter(rows.to(dtype), requires_grad=False)

    def keep(self, values: torch.Tensor) -> int:
        """Return the address of a copy of a vector as float32, zero-padded to a multiple of 32."""
        copy = torch.zeros(padded(values.shape[0], PAIR), dtype=torch.float32)
        copy[: values.shape[0]] = values.detach()
        self._kept.append(copy)
        return copy.data_ptr()

    def _take(self, num_bytes: int) -> int:
        place, self._next = self._next, self._next + num_bytes
        assert self._next <= self._end, "more is packed than num_bytes"
        return place

    def _bias(self, weights: Sequence[nn.Linear], gated: bool) -> int | None:
        if all(linear.bias is None for linear in weights):
            return None
        parts = [_panels_of_bias(linear) for linear in weights]
        return self.keep(torch.stack(parts, dim=1).flatten() if gated else torch.cat(parts).flatten())


def packed_bytes(weights: Sequence[nn.Linear]) -> int:
    """Return how many bytes `PackedMemory.pack` takes."""
    panels = padded(sum(num_panels(linear.weight.shape[0]) for linear in weights), PAIR // PANEL)
    size = panels * PANEL * weights[0].weight.shape[1] * weights[0].weight.element_size()
    return padded(size, _LINE)


def num_panels(columns: int) -> int:
    """Return how many panels these columns fill."""
    return -(-columns // PANEL)


def free(module: nn.Linear | nn.Embedding) -> None:
    """Free a packed layer's own weight; its small bias is kept."""
    module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)


def _places(weights: Sequence[nn.Linear], gated: bool) -> Iterator[tuple[nn.Linear, int, int]]:
    """Yield (linear, its first panel, distance between its panels)."""
    panels = 0
    for index, linear in enumerate(weights):
        yield (linear, index, 2) if gated else (linear, panels, 1)
        panels += num_panels(linear.out_features)


def _panels_of_bias(linear: nn.Linear) -> torch.Tensor:
    """Return the bias as [panels, 16], zero-padded."""
    columns = linear.weight.shape[0]
    values = torch.zeros(num_panels(columns) * PANEL, dtype=torch.float32)
    if linear.bias is not None:
        values[:columns] = linear.bias.detach()
    return values.view(-1, PANEL)
