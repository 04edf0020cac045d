"""Read a quantised checkpoint as if it were a plain one: each part is dequantised when it is read."""

from collections.abc import Container, Sequence

import torch

from engine.checkpoints.weights import TensorSlice, Weights
from engine.quantization.arithmetic import Matrix
from engine.quantization.interface import Layout, QuantisedModule
from engine.quantization.modelslim import DerivedBias
from engine.quantization.mxfp4 import Experts
from wire.errors import ConfigError


class DequantisingWeights:
    """Weights over `stored` with `<module>.weight` in `dtype` in place of codes, scales and zeros.

    Reading a part of the outputs (dimension 0) or inputs (dimension 1) reads only the words and groups that it touches.
    The constructor raises ConfigError for tensors that do not fit `layout`.
    """

    def __init__(self, stored: Weights, layout: Layout, dtype: torch.dtype) -> None:
        self._stored = stored
        self._dtype = dtype
        self._tensors = dict(layout.tensors(stored))
        if not self._tensors:
            raise ConfigError(f"the config says {layout.name}, but no tensor of the checkpoint has that layout")
        modules = frozenset(name.rpartition(".")[0] for name in self._tensors)
        plain = (name for name in stored.names if not _is_hidden(name, layout, modules))
        self._names = sorted({*plain, *self._tensors})
        self._name_set = frozenset(self._names)

    @property
    def names(self) -> Sequence[str]:
        """All tensors, sorted, quantised weights under their plain names."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor in the network."""
        if name in self._tensors:
            return self._tensors[name].shape
        return self._plain(name).shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of `read`: the chosen one for dequantised weights, else the stored one."""
        return self._dtype if name in self._tensors else self._plain(name).dtype(name)

    def read(self, name: str, part: TensorSlice | None = None) -> torch.Tensor:
        """Return a plain tensor, or a range of one dimension of it."""
        if name not in self._tensors:
            return self._plain(name).read(name, part)
        tensor = self._tensors[name]
        taken = tensor.shape if part is None else _cut(name, tensor.shape, part)
        if 0 in taken:
            return torch.empty(taken, dtype=self._dtype)
        return tensor.dequantise(part, self._dtype)

    def module(self, name: str) -> QuantisedModule | None:
        """Return the quantised linear layer whose weight is `name`, None where it is not such a weight."""
        tensor = self._tensors.get(name)
        return tensor.module if isinstance(tensor, Matrix) else None

    def experts(self, name: str) -> tuple[QuantisedModule, ...]:
        """Return the weight of each expert where `name` is one quantised tensor of a layer's experts, else nothing."""
        tensor = self._tensors.get(name)
        return tensor.modules if isinstance(tensor, Experts) else ()

    @property
    def num_quantised(self) -> int:
        """How many weights are quantised."""
        return sum(not isinstance(tensor, DerivedBias) for tensor in self._tensors.values())

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        stored = self._stored
        return sum(_num_elements(stored.shape(name)) * stored.dtype(name).itemsize for name in stored.names)

    @property
    def held_bytes(self) -> int:
        """Bytes of all tensors in the chosen dtype."""
        return sum(_num_elements(self.shape(name)) for name in self._names) * self._dtype.itemsize

    def _plain(self, name: str) -> Weights:
        if name not in self._name_set:
            raise KeyError(name)
        return self._stored


def _cut(name: str, shape: tuple[int, ...], part: TensorSlice) -> tuple[int, ...]:
    """Return the shape of a part. Raises ValueError for one out of range."""
    if not 0 <= part.dim < len(shape) or not 0 <= part.start <= part.end <= shape[part.dim]:
        raise ValueError(f"{name} has shape {shape}: [{part.start}, {part.end}) is outside dimension {part.dim}")
    return (*shape[: part.dim], part.end - part.start, *shape[part.dim + 1 :])


def _is_hidden(name: str, layout: Layout, modules: Container[str]) -> bool:
    module, _, tensor = name.rpartition(".")
    return tensor in layout.dropped or (tensor in layout.companions and module in modules)


def _num_elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
