"""Linear layers with the same input, computed as one product, which reads all their weights at once."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class JoinedLinear:
    """Owns the joined weight; after `free_originals` the weights of the original layers are views of it."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._linears = tuple(linears)
        self.sizes = [linear.weight.shape[0] for linear in linears]
        self.weight = torch.cat([linear.weight.detach() for linear in linears])  # [sum(sizes), inputs]
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self.bias = torch.cat(biases) if biases else None

    @classmethod
    def of(cls, modules: Sequence[object], shared: frozenset[int] = frozenset()) -> "JoinedLinear | None":
        """Return `modules` joined, or None if one of them is not plain or they cannot be joined.

        `shared` has the ids of tensors with several names: these are not joined.
        """
        if not modules or not all(is_plain(module) and not _tensor_ids(module) & shared for module in modules):
            return None
        linears: list[Any] = list(modules)
        alike = {
            (one.weight.shape[1], one.weight.dtype, one.weight.device, one.bias is None, _bias_dtype(one))
            for one in linears
        }  # fmt: skip
        return cls(linears) if len(alike) == 1 else None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [..., sum(sizes)] of rows [..., inputs]."""
        return nn.functional.linear(rows, self.weight, self.bias)

    def free_originals(self) -> None:
        """Free the original layers' weights."""
        for place, weight in enumerate(torch.split(self.weight, self.sizes)):
            self._linears[place].weight = nn.Parameter(weight, requires_grad=False)
        for place, bias in enumerate(() if self.bias is None else torch.split(self.bias, self.sizes)):
            self._linears[place].bias = nn.Parameter(bias, requires_grad=False)


def is_plain(module: object) -> bool:
    """Return whether it is an unmodified linear layer: no subclass, no hook, no replaced forward."""
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        return False
    return not (module._forward_hooks or module._forward_pre_hooks)


def shared_tensors(network: nn.Module) -> frozenset[int]:
    """Return the ids of parameters that have several names in `network`."""
    names = Counter(id(tensor) for _, tensor in network.named_parameters(remove_duplicate=False))
    return frozenset(tensor for tensor, count in names.items() if count > 1)


def _tensor_ids(module: Any) -> set[int]:
    return {id(module.weight), id(module.bias)} - {id(None)}


def _bias_dtype(linear: nn.Linear) -> torch.dtype | None:
    return None if linear.bias is None else linear.bias.dtype
