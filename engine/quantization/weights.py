"""A quantised checkpoint read as if it were a plain one: each part is dequantised as it is asked for."""

from collections.abc import Container, Sequence

import torch

from engine.quantization.arithmetic import dequantise
from engine.quantization.interface import Layout
from engine.weights import Part, Weights
from wire.errors import ConfigError


class DequantisingWeights:
    """Weights over `stored` with `<module>.weight` in `dtype` in place of codes, scales and zeros.

    A part reads what its outputs (dimension 0) or inputs (dimension 1) need, and no more than whole words and groups.
    Raises ConfigError when it is made for tensors that do not fit `layout`.
    """

    def __init__(self, stored: Weights, layout: Layout, dtype: torch.dtype) -> None:
        self._stored = stored
        self._dtype = dtype
        found = dict(layout.modules(stored))
        if not found:
            raise ConfigError(f"the config says {layout.name}, but no tensor of the checkpoint is stored like that")
        self._modules = {f"{module}.weight": quantised for module, quantised in found.items()}
        plain = (name for name in stored.names if not _is_hidden(name, layout, found))
        self._names = sorted({*plain, *self._modules})
        self._name_set = frozenset(self._names)

    @property
    def names(self) -> Sequence[str]:
        """All tensors, sorted, quantised weights under their plain names."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's whole shape, [outputs, inputs] for a dequantised weight."""
        if name in self._modules:
            return self._modules[name].shape
        return self._plain(name).shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that `read` gives: the one chosen for dequantised weights, else the stored one."""
        return self._dtype if name in self._modules else self._plain(name).dtype(name)

    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        """Return a plain tensor, or a range of one dimension of it, equal to that range of the whole."""
        if name not in self._modules:
            return self._plain(name).read(name, part)
        module = self._modules[name]
        rows, columns = _ranges(name, module.shape, part)
        if not rows or not columns:
            return torch.empty(len(rows), len(columns), dtype=self._dtype)
        return dequantise(module.read(rows, columns), self._dtype)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors as they lie in the files."""
        stored = self._stored
        return sum(_num_elements(stored.shape(name)) * stored.dtype(name).itemsize for name in stored.names)

    @property
    def held_bytes(self) -> int:
        """Bytes of all tensors once they are in the dtype that was chosen."""
        return sum(_num_elements(self.shape(name)) for name in self._names) * self._dtype.itemsize

    def _plain(self, name: str) -> Weights:
        if name not in self._name_set:
            raise KeyError(name)
        return self._stored


def _ranges(name: str, shape: tuple[int, int], part: Part | None) -> tuple[range, range]:
    rows, columns = (range(length) for length in shape)
    if part is None:
        return rows, columns
    if part.dim not in (0, 1) or not 0 <= part.start <= part.end <= shape[part.dim]:
        raise ValueError(f"{name} has shape {shape}: no [{part.start}, {part.end}) of dimension {part.dim}")
    asked = range(part.start, part.end)
    return (asked, columns) if part.dim == 0 else (rows, asked)


def _is_hidden(name: str, layout: Layout, modules: Container[str]) -> bool:
    module, _, tensor = name.rpartition(".")
    return tensor in layout.dropped or (tensor in layout.companions and module in modules)


def _num_elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
