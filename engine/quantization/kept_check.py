"""Compare a layer that stays quantised (kept.py) with its dequantised weight, on the same random rows.

Rows are standard normal, so the output of a weight row w has the standard deviation |w|. The standard deviation of its
error, which the format's rounding causes, is estimated by the root mean square of the errors over the rows; with 32
rows, chance never makes the estimate twice as large.

A layer with static inputs is compared with its own formula, in floats, on rows that fit its step.
"""

from typing import Protocol

import torch

from engine.quantization.arithmetic import dequantise
from engine.quantization.interface import Grouped
from engine.quantization.kept import KeptFormat, KeptWeight
from engine.quantization.kept_experts import ExpertsFormat
from engine.quantization.kept_static import reference_outputs

_TOGETHER, _ALONE, _AGAIN = 24, 8, 8
_SLACK = 2.0
_STEPS = 25  # the standard deviation of static inputs, in steps: 5 times that is within int8


class KeptProduct(Protocol):
    """A layer that stays quantised (KeptLinear), or one expert of several."""

    @property
    def in_features(self) -> int:
        """Columns of a row."""
        ...

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [num_rows, outputs] of [num_rows, in_features], without a bias."""
        ...


def disagreement(
    kept: KeptProduct, grouped: Grouped, weight: KeptWeight, form: KeptFormat | ExpertsFormat, dtype: torch.dtype
) -> str | None:  # fmt: skip
    """Describe how far the kept layer is from the dequantised one; None where its rounding explains the difference.

    `grouped` is the whole weight in the order of the layer's inputs. The bias is not compared: it is not loaded yet.
    """
    rows, expected, norms = _rows(grouped, weight, dtype)
    few = torch.cat([kept.product(rows[:_TOGETHER]), *(kept.product(row[None]) for row in rows[_TOGETHER:])])
    many = kept.product(rows.repeat(_AGAIN, 1))[-len(rows) :]  # kernels may use another method for many rows
    both = torch.stack((few, many)).float() - expected
    error = both.square().mean(1).sqrt().amax(0)  # [outputs]
    allowed = _SLACK * (form.deviation(weight, rows, norms) + _of_sums(kept.in_features, dtype) * norms)
    if bool((error <= allowed).all()):
        return None
    worst = int((error / allowed.clamp(min=torch.finfo(torch.float32).tiny)).nan_to_num(nan=torch.inf).argmax())
    return f"output {worst} is off by {float(error[worst]):.3g}, but rounding explains only {float(allowed[worst]):.3g}"


def _rows(
    grouped: Grouped, weight: KeptWeight, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return rows in `dtype`, the outputs expected of them, and the deviation of each output."""
    numbers = torch.Generator().manual_seed(0)
    rows = torch.randn(_TOGETHER + _ALONE, grouped.codes.shape[1], generator=numbers)
    if weight.static is not None:
        rows = ((rows * _STEPS - weight.static.zero) * weight.static.step).to(grouped.codes.device, dtype)
        expected = reference_outputs(weight, rows)
        return rows, expected, expected.square().mean(0).sqrt()
    rows = rows.to(grouped.codes.device, dtype)
    matrix = dequantise(grouped, torch.float32)
    return rows, rows.float() @ matrix.t(), matrix.norm(dim=1)


def _of_sums(inputs: int, dtype: torch.dtype) -> float:
    """Return the relative error of an output that is summed in float32 and rounded to `dtype`."""
    return (inputs * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps) / 2
