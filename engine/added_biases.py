"""Biases that a checkpoint has and transformers' network lacks: ModelSlim shifts the inputs of quantised layers.

norm     the shift, added to the norm's output: transformers' norms have no bias
linear   a bias that removes the shift's effect on the outputs
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from engine.checkpoints.tensor_sources import TensorSource
from engine.checkpoints.weights import Weights
from wire.errors import ConfigError


def add_biases(network: Any, weights: Weights) -> None:
    """Give each layer without a bias the one that `weights` has under its name, unless that bias is zero."""
    stored = frozenset(weights.names)
    for path, module in network.named_modules():
        weight, has_place = getattr(module, "weight", None), hasattr(module, "bias")
        if f"{path}.bias" not in stored or not isinstance(weight, nn.Parameter) or has_bias(module):
            continue
        bias = weights.read(f"{path}.bias")
        if bool(bias.any()) and (has_place or weight.dim() == 1):  # other modules here are routers, not norms
            module.bias = nn.Parameter(bias.to(weight.device, weight.dtype), requires_grad=False)
            if not has_place:
                module.register_forward_hook(_add)


def has_bias(module: Any) -> bool:
    """Return whether a layer adds a bias."""
    return getattr(module, "bias", None) is not None


def check_biases(sources: Mapping[str, TensorSource], weights: Weights) -> None:
    """Raise ConfigError for a nonzero bias that `add_biases` has not added to its layer."""
    used = {name for source in sources.values() for column in source.columns for name in column}
    biases = {f"{name.removesuffix('weight')}bias" for name in used if name.endswith(".weight")} - used
    for name in sorted(biases.intersection(weights.names)):
        if bool(weights.read(name).any()):
            raise ConfigError(f"{name} is not zero, but its layer cannot have a bias in this network")


def _add(module: Any, _inputs: object, output: torch.Tensor) -> torch.Tensor:
    return output + module.bias  # type: ignore[no-any-return]
