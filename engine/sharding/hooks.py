"""The sums over the ranks in the forward pass of a rank's network."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

AllReduce = Callable[[torch.Tensor], None]
"""Sums a tensor over all ranks, in place."""


def num_reductions(network: Any) -> int:
    """Return how often a forward pass sums over the ranks."""
    modules = [*network.modules()]
    hooks = [hook for module in modules for hook in module._forward_hooks.values() if isinstance(hook, SumOverRanks)]
    return len(hooks) + sum(isinstance(module, NormOverRanks) for module in modules)


class SumOverRanks:
    """A forward hook that sums a module's output over the ranks."""

    def __init__(self, all_reduce: AllReduce) -> None:
        self._all_reduce = all_reduce

    def __call__(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self._all_reduce(output)


class NormOverRanks(nn.Module):
    """A root-mean-square norm over the heads of all ranks: the squares are summed over the ranks."""

    def __init__(self, norm: Any, *, holders: int, all_reduce: AllReduce) -> None:
        """`norm` is over the whole width, and may have a bias; `holders` ranks have the heads that this rank has."""
        super().__init__()
        self.weight: nn.Parameter = norm.weight
        self.bias: nn.Parameter | None = getattr(norm, "bias", None)
        self._width, self._eps, self._holders = len(norm.weight), float(norm.variance_epsilon), holders
        self._all_reduce = all_reduce

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [..., this rank's heads x dim], normed over the whole width, in the dtype of the input."""
        wide = hidden.float()
        squares = wide.pow(2).sum(-1, keepdim=True) / self._holders  # [..., 1]
        self._all_reduce(squares)
        normed = (self.weight * (wide * torch.rsqrt(squares / self._width + self._eps))).to(hidden.dtype)
        return normed if self.bias is None else normed + self.bias


class LocalConfig:
    """A config for one rank's attention: its own head counts, all other values from the original."""

    def __init__(self, config: Any, own: dict[str, int]) -> None:
        self._config, self._own = config, own

    def __getattr__(self, name: str) -> Any:
        return self._own[name] if name in self._own else getattr(self._config, name)
