"""float8 weights as transformers' `fp8` method stores them, also for DeepSeek: one factor per block of a weight.

weight [outputs, inputs] float8_e4m3    weight_scale_inv [row blocks, column blocks], a multiplier, or one number
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.checkpoints.weights import Weights
from engine.quantization.arithmetic import Matrix
from engine.quantization.interface import QuantisedTensor
from engine.quantization.scaled import scaled_module

_MARK = "weight_scale_inv"


@dataclass(frozen=True, slots=True)
class Fp8Layout:
    """The fp8 settings of config.json; `block` is (outputs, inputs), or None for the whole weight."""

    block: tuple[int, int] | None
    name: str = "fp8"
    rounds_inputs: bool = True
    rounded_inputs: torch.dtype | None = None
    has_static_inputs: bool = False
    adds_biases: bool = False
    companions: frozenset[str] = frozenset({_MARK, "activation_scale", "input_scale"})
    dropped: frozenset[str] = frozenset()

    def tensors(self, stored: Weights) -> Iterator[tuple[str, QuantisedTensor]]:
        """Yield the weight of each module that has a weight_scale_inv."""
        for name in stored.names:
            module, _, tensor = name.rpartition(".")
            if tensor == _MARK:
                yield f"{module}.weight", Matrix(scaled_module(stored, module, scale=name, zero=None, block=self.block))
