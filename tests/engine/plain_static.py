"""W8A8 with static inputs in whole numbers by numpy, as vLLM Ascend's AscendW8A8LinearMethod has an NPU compute it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import nn

from engine.quantization.interface import EvenGroups, Grouped, StaticInputs

Array = NDArray[Any]
_SHORT = -8192
"""Keeps the upper 19 bits of a float32, with which an NPU computes outputs in float16."""


@dataclass(frozen=True)
class PlainStatic:
    """One layer; `deq_scale` float32 [outputs]."""

    codes: Array
    quant_bias: Array
    deq_scale: Array
    step: float
    zero: int

    @classmethod
    def of(cls, tensors: dict[str, torch.Tensor], layer: str) -> "PlainStatic":
        """Return a layer of a checkpoint."""
        codes, bias, deq, step, zero = (
            tensors[f"{layer}.{part}"] for part in ("weight", "quant_bias", "deq_scale", "input_scale", "input_offset")
        )
        if deq.dtype == torch.int64:
            deq = deq.int().view(torch.float32)
        return cls(codes.numpy(), bias.numpy(), deq.numpy(), float(step), int(zero))

    def rounded(self, rows: torch.Tensor) -> Array:
        """Return int64 [num_rows, inputs]: the scale and its inverse are rounded to the rows' dtype."""
        step = torch.tensor(self.step, dtype=rows.dtype)
        per_step = np.float32(torch.tensor(1 / float(step), dtype=rows.dtype).float())
        values = rows.float().numpy() * per_step + np.float32(self.zero)
        return np.asarray(np.clip(np.rint(values), -128, 127).astype(np.int64))

    def sums(self, rows: torch.Tensor) -> Array:
        """Return int64 [num_rows, outputs]."""
        sums: Array = self.rounded(rows) @ self.codes.astype(np.int64).T + self.quant_bias
        assert np.abs(sums).max() < 2**31
        return sums

    def outputs(self, rows: torch.Tensor) -> Array:
        """Return float64 [num_rows, outputs]: exact."""
        scale = self.deq_scale
        if rows.dtype == torch.float16:
            scale = (scale.view(np.int32) & _SHORT).view(np.float32)
        return np.asarray(self.sums(rows) * scale.astype(np.float64))


def compute_statically(network: Any, folder: Path) -> None:
    """Let the linear layers of transformers' network compute what the checkpoint says; their biases are in it."""
    tensors = load_file(next(folder.glob("*.safetensors")))
    for name, layer in network.named_modules():
        if f"{name}.quant_bias" in tensors:
            assert isinstance(layer, nn.Linear)
            layer.forward = _Forward(PlainStatic.of(tensors, name))  # type: ignore[method-assign,assignment]


@dataclass(frozen=True)
class _Forward:
    layer: PlainStatic

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        flat = rows.detach().reshape(-1, rows.shape[-1])
        return torch.from_numpy(self.layer.outputs(flat)).to(rows.dtype).reshape(*rows.shape[:-1], -1)


def static_layer(outputs: int, inputs: int, *, step: float = 0.037, zero: int = -9) -> tuple[Grouped, PlainStatic]:
    """A random layer, and the same for the oracle."""
    numbers = torch.Generator().manual_seed(outputs + inputs)
    codes = torch.randint(-128, 128, (outputs, inputs), generator=numbers, dtype=torch.int8)
    scales = torch.rand(outputs, generator=numbers) * 1e-3 + 1e-5
    bias = torch.randint(-9000, 9000, (outputs,), generator=numbers, dtype=torch.int32)
    bias -= zero * codes.sum(1, dtype=torch.int32)
    static = StaticInputs(step, zero, scales, bias)
    plain = PlainStatic(codes.numpy(), bias.numpy(), scales.numpy(), step, zero)
    return Grouped(codes, scales[:, None] / step, None, EvenGroups(inputs), static), plain


def rows_of(count: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of which some exceed the range of int8, and some are halfway between two steps."""
    rows = torch.randn(count, inputs, generator=torch.Generator().manual_seed(3)) * 2.5
    rows[0] = (torch.arange(inputs) % 300 - 150 + 0.5) * 0.037
    return rows.to(dtype)
