"""Experts that stay quantised: one weight of each expert of a layer as codes and scales, in place of its parameter.

    rows, sorted by expert --KeptExperts--> each row times its expert's weight

experts-float8    float8 with one scale per output, inputs rounded to it token by token: one op of torch, on GPUs
npu-experts-int8  W8A8 likewise, by torch_npu's op (kept_npu_experts.py)
experts-widened   all codes: a few experts at a time are widened to the rows' dtype and multiplied in groups; with fewer
                  rows than experts, only the expert of each row is widened

Nothing here waits for the device, so that graphs can contain it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from engine.quantization.compact import CompactWeights
from engine.quantization.kept import KeptWeight
from engine.quantization.kept_rounded import LARGEST, round_by_token

_STEP_BYTES = 16


class ExpertsKernel(Protocol):
    """Multiplies rows by the weights of a layer's experts. Owns its tensors."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        ...

    def __call__(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return [num_rows, outputs] of rows [num_rows, inputs], sorted by expert, in their dtype.

        `ends` [num_experts] int64: where each expert's rows end; the last is num_rows.
        """
        ...


class ExpertsFormat(Protocol):
    """A method by which a device computes with the codes of experts."""

    @property
    def rounds_inputs(self) -> bool:
        """Whether inputs are rounded to the type of the codes."""
        ...

    def handles(self, weights: CompactWeights, rounded_inputs: torch.dtype | None) -> bool:
        """Return whether it handles this type of codes; `rounded_inputs` as in KeptWeight."""
        ...

    def lacking(self, weights: CompactWeights, dtype: torch.dtype) -> str | None:
        """Return why it cannot compute with these weights and rows of `dtype`, or None if it can."""
        ...

    def pack(self, weights: CompactWeights, dtype: torch.dtype) -> ExpertsKernel:
        """Return the kernel for rows of `dtype`. Raises RuntimeError, as torch does, if the device refuses."""
        ...

    def deviation(self, weight: KeptWeight, rows: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
        """See KeptFormat; `weight` is one expert's."""
        ...


class KeptExperts(nn.Module):
    """One weight of each expert. Its tensors are not parameters or buffers, so nothing moves or casts them."""

    def __init__(self, kernel: ExpertsKernel, *, rounds_inputs: bool) -> None:
        super().__init__()
        self._kernel, self.rounds_inputs = kernel, rounds_inputs

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights, scales and zeros included."""
        return self._kernel.num_bytes

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """See ExpertsKernel."""
        return self._kernel(rows, ends)


class ByCodes:
    """Implements GroupedOps for layers whose weights are KeptExperts (engine/modules/experts.py)."""

    name = implementation = "codes"

    def unsupported(self, layer: Any) -> str | None:
        """See GroupedOps."""
        return None

    def multiply(self, rows: torch.Tensor, weight: Any, ends: torch.Tensor) -> torch.Tensor:
        """See GroupedOps; `weight` is KeptExperts."""
        made: torch.Tensor = weight(rows, ends)
        return made


@dataclass(frozen=True, slots=True)
class WidenedKernel:
    """Implements ExpertsKernel. At any time at most SCRATCH_BYTES of floats exist, or those of one expert."""

    weights: CompactWeights

    @property
    def num_bytes(self) -> int:
        """See ExpertsKernel."""
        return self.weights.num_bytes

    def __call__(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """See ExpertsKernel."""
        num_experts, outputs, _ = self.weights.shape
        places, at_once = torch.arange(len(rows), device=rows.device), self.weights.in_scratch(rows.dtype)
        made = rows.new_empty(len(rows), outputs)
        if len(rows) <= num_experts:
            experts = torch.searchsorted(ends, places, right=True)
            for first in range(0, len(rows), at_once):
                part = slice(first, first + at_once)
                made[part] = torch.bmm(self.weights.widened(experts[part], rows.dtype), rows[part, :, None])[..., 0]
            return made
        for first in range(0, num_experts, at_once):
            part = slice(first, first + at_once)
            begin = ends[first - 1] if first else torch.zeros_like(ends[0])
            made = _grouped(rows, self.weights.widened(part, rows.dtype), begin, ends[part], places, made)
        return made


def _grouped(
    rows: torch.Tensor, weights: torch.Tensor, begin: torch.Tensor, ends: torch.Tensor, places: torch.Tensor,
    made: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Return `made` with the products of rows [begin, ends[-1]), which are those of some neighbouring experts.

    The host does not know `begin`: these rows are moved to the front, where the first group begins.
    """
    front = rows[(places + begin) % len(rows)]
    products = functional.grouped_mm(front, weights.transpose(1, 2), offs=(ends - begin).to(torch.int32))
    inside = (places >= begin) & (places < ends[-1])
    return torch.where(inside[:, None], products[(places - begin) % len(rows)], made)


@dataclass(frozen=True, slots=True)
class WidenedExperts:
    """Implements ExpertsFormat."""

    @property
    def rounds_inputs(self) -> bool:
        """See ExpertsFormat."""
        return False

    def handles(self, weights: CompactWeights, rounded_inputs: torch.dtype | None) -> bool:
        """See ExpertsFormat."""
        return True

    def lacking(self, weights: CompactWeights, dtype: torch.dtype) -> str | None:
        """See ExpertsFormat. The rule is that of transformers' and torch's checks of grouped_mm's strides."""
        odd = [size for size in weights.shape[1:] if size * dtype.itemsize % _STEP_BYTES]
        if odd:
            return f"experts of {odd[0]} columns: grouped_mm requires rows in multiples of {_STEP_BYTES} bytes"
        return None

    def pack(self, weights: CompactWeights, dtype: torch.dtype) -> ExpertsKernel:
        """See ExpertsFormat."""
        return WidenedKernel(weights)

    def deviation(self, weight: KeptWeight, rows: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
        """See ExpertsFormat. Each weight is rounded once."""
        return norms * (torch.finfo(rows.dtype).eps / 2)


@dataclass(frozen=True, slots=True)
class RoundedExpertsOp:
    """A device's op, called `name`, that multiplies inputs and codes of type `codes` in groups of rows.

    `multiply` takes rows, codes, scales and ends, and returns [num_rows, outputs] in the rows' dtype. `scales` maps the
    rows' dtype to the dtype of the scales [num_experts, outputs]. `lay_out` arranges codes [num_experts, outputs,
    inputs] for `multiply`. `beyond` describes unsupported sizes, None if supported.
    """

    name: str
    codes: torch.dtype
    multiply: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    scales: Mapping[torch.dtype, torch.dtype]
    lay_out: Callable[[torch.Tensor], torch.Tensor]
    beyond: Callable[[CompactWeights], str | None]


@dataclass(frozen=True, slots=True)
class RoundedExpertsKernel:
    """Implements ExpertsKernel. `codes` in the op's layout."""

    codes: torch.Tensor
    scales: torch.Tensor
    op: RoundedExpertsOp

    @property
    def num_bytes(self) -> int:
        """See ExpertsKernel."""
        return self.codes.nbytes + self.scales.nbytes

    def __call__(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """See ExpertsKernel."""
        return self.op.multiply(rows, self.codes, self.scales, ends)


@dataclass(frozen=True, slots=True)
class RoundedExperts:
    """Implements ExpertsFormat."""

    op: RoundedExpertsOp

    @property
    def rounds_inputs(self) -> bool:
        """See ExpertsFormat."""
        return True

    def handles(self, weights: CompactWeights, rounded_inputs: torch.dtype | None) -> bool:
        """See ExpertsFormat: codes of a checkpoint whose inputs are rounded to their type, one scale per output."""
        return weights.codes.dtype == self.op.codes == rounded_inputs and weights.scales.shape[2] == 1

    def lacking(self, weights: CompactWeights, dtype: torch.dtype) -> str | None:
        """See ExpertsFormat."""
        if dtype not in self.op.scales:
            return f"{self.op.name} returns {' or '.join(map(_name, self.op.scales))}, not {_name(dtype)}"
        if weights.zeros is not None:
            return f"{self.op.name} supports no zeros"
        return self.op.beyond(weights)

    def pack(self, weights: CompactWeights, dtype: torch.dtype) -> ExpertsKernel:
        """See ExpertsFormat."""
        num_experts, outputs, _ = weights.shape
        blocks = weights.scales.to(self.op.scales[dtype])  # [num_experts, row blocks, 1]
        scales = blocks.expand(-1, -1, outputs // blocks.shape[1]).reshape(num_experts, outputs)
        return RoundedExpertsKernel(self.op.lay_out(weights.codes), scales, self.op)

    def deviation(self, weight: KeptWeight, rows: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
        """See ExpertsFormat. Scales are rounded; an input is off by half its token's step, or half an ulp."""
        of_scales = torch.finfo(self.op.scales[rows.dtype]).eps / 2
        if self.op.codes.is_floating_point:
            return norms * (torch.finfo(self.op.codes).eps / 2 + of_scales)
        return norms * (rows.float().abs().max() / (2 * LARGEST[self.op.codes]) + of_scales)


def _float8(rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    rounded, steps = round_by_token(rows, torch.float8_e4m3fn)
    return torch._scaled_grouped_mm(
        rounded, codes, steps.flatten(), scales, offs=ends.to(torch.int32), out_dtype=torch.bfloat16
    )  # fmt: skip


def _in_16s(weights: CompactWeights) -> str | None:
    _, outputs, inputs = weights.shape
    if outputs % 16 or inputs % 16:
        return f"_scaled_grouped_mm supports multiples of 16 x 16, not {outputs} x {inputs}"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


FLOAT8_EXPERTS = RoundedExpertsOp(
    "_scaled_grouped_mm", torch.float8_e4m3fn, _float8, {torch.bfloat16: torch.float32},
    lambda codes: codes.transpose(1, 2), _in_16s,
)  # fmt: skip
"""Sizes, strides and dtypes as in meta_scaled_grouped_mm (torch/_meta_registrations.py), devices as in
_scaled_grouped_mm_cuda (ATen/native/cuda/GroupedBlas.cpp): compute capability 9.0 and 10.0."""
