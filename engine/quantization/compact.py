"""Quantised weights of one shape, kept as codes and scales; a few weights at a time are widened to floats.

codes    4 bits: two to a byte, the first in the high half, with a table of their values; otherwise as stored
scales   one row for all outputs that share it: [12, 16] for a weight [1536, 2048] in blocks of 128 x 128
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch

from engine.quantization.interface import EvenGroups, Grouped
from engine.quantization.kept import KeptWeight

SCRATCH_BYTES = 256 << 20
"""Bytes of widened floats that may exist at a time, or those of one weight if it has more. Never tuned on a device."""


@dataclass(frozen=True, slots=True)
class CompactWeights:
    """`codes` [num_weights, outputs, inputs], or uint8 with half the inputs where `pairs` has the values of each byte.

    `scales` [num_weights, row blocks, groups]: outputs are in equal row blocks, and inputs in equal groups, that share
    a scale. `zeros` have the shape of the scales, in units of the codes, None where all are 0.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    pairs: torch.Tensor | None = None  # [256, 2]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(num_weights, outputs, inputs)."""
        num_weights, outputs, width = self.codes.shape
        return num_weights, outputs, width if self.pairs is None else 2 * width

    @property
    def num_bytes(self) -> int:
        """Bytes of its codes, scales and zeros."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def to(self, device: torch.device) -> "CompactWeights":
        """Return a copy on `device`."""
        zeros, pairs = (None if tensor is None else tensor.to(device) for tensor in (self.zeros, self.pairs))
        return CompactWeights(self.codes.to(device), self.scales.to(device), zeros, pairs)

    def in_scratch(self, dtype: torch.dtype) -> int:
        """Return how many of these weights may be widened at a time."""
        _, outputs, inputs = self.shape
        return max(1, SCRATCH_BYTES // (outputs * inputs * dtype.itemsize))

    def widened(self, chosen: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return [num_chosen, outputs, inputs] in `dtype`; `chosen` is int64 [num_chosen], on the device of the codes.

        Every dtype represents codes and their differences from zeros exactly: they have at most 8 bits. The product
        with the scale is rounded once, as in `dequantise`.
        """
        codes = _pick(self.codes, chosen)
        if self.pairs is None:
            values = codes.to(dtype)
        else:
            pairs = self.pairs.to(dtype).index_select(0, codes.flatten().to(torch.int32))
            values = pairs.view(len(codes), *self.shape[1:])
        scales = _pick(self.scales, chosen)
        num_chosen, num_blocks, num_groups = scales.shape
        blocks = values.view(num_chosen, num_blocks, -1, num_groups, values.shape[2] // num_groups)
        if self.zeros is not None:
            blocks -= _pick(self.zeros, chosen).to(dtype)[:, :, None, :, None]
        torch.mul(blocks, scales[:, :, None, :, None], out=blocks)
        return values


def compact_linear(weight: KeptWeight) -> CompactWeights:
    """Return one weight; each block of its outputs that share their scales counts as a weight of its own."""
    scales, zeros = _shared(weight.scales[None], None if weight.zeros is None else weight.zeros[None])
    codes = weight.codes.reshape(scales.shape[1], -1, weight.shape[1])
    return CompactWeights(codes, scales[0, :, None], None if zeros is None else zeros[0, :, None])


def compact_experts(
    weights: Iterable[KeptWeight | str], num_experts: int, device: torch.device, values: Sequence[int] | None = None
) -> CompactWeights | str:
    """Return one weight of each expert; each weight is moved to `device` as soon as it is read.

    `values` are the 16 values that codes may have, if not 0 to 15. Returns a reason instead if a weight cannot be kept,
    or if the weights are stored in different forms.
    """
    codes, scales, zeros = torch.empty(0), list[torch.Tensor](), list[torch.Tensor | None]()
    first: KeptWeight | None = None
    for number, weight in enumerate(weights):
        if isinstance(weight, str):
            return weight
        if weight.order is not None:
            return "experts in act order have no kernel"
        if weight.static is not None:
            return "experts with static inputs have no kernel"
        first = first or weight
        if _form(weight) != _form(first) or (weight.num_bits or 0) > (first.num_bits or 0):
            return "experts of one layer are stored in different forms"
        own = _packed(weight.codes, values) if _is_packed(first) else weight.codes
        if number == 0:
            codes = torch.empty(num_experts, *own.shape, dtype=own.dtype, device=device)
        codes[number].copy_(own)
        scales.append(weight.scales)
        zeros.append(weight.zeros)
    assert first is not None
    assert len(scales) == num_experts
    dtype = next((one.dtype for one in zeros if one is not None), None)
    whole = None if dtype is None else torch.stack([_or_zeros(one, first.scales, dtype) for one in zeros])
    shared, shared_zeros = _shared(torch.stack(scales), whole)
    held = None if shared_zeros is None else shared_zeros.to(device)
    pairs = _pairs(values or range(16)).to(device) if _is_packed(first) else None
    return CompactWeights(codes, shared.to(device), held, pairs)


def joined(parts: Iterable[KeptWeight | str]) -> KeptWeight | str:
    """Return weights that have the same inputs, joined along their outputs, or why they cannot be joined."""
    found = []
    for part in parts:
        if isinstance(part, str):
            return part
        found.append(part)
    first, *others = found
    if not others:
        return first
    if first.order is not None or any(one.order is not None for one in others):
        return "experts in act order have no kernel"
    if any((one.group_size, one.codes.dtype) != (first.group_size, first.codes.dtype) for one in others):
        return "experts of one layer are stored in different forms"
    dtype = next((one.zeros.dtype for one in found if one.zeros is not None), None)
    zeros = None if dtype is None else torch.cat([_or_zeros(one.zeros, one.scales, dtype) for one in found])
    return replace(
        first, codes=torch.cat([one.codes for one in found]), scales=torch.cat([one.scales for one in found]),
        zeros=zeros, num_bits=None if first.num_bits is None else max(one.num_bits or 0 for one in found),
    )  # fmt: skip


def grouped_of(weight: KeptWeight) -> Grouped:
    """Return a weight whose columns are in order in the form that `dequantise` expects."""
    assert weight.order is None
    return Grouped(weight.codes, weight.scales, weight.zeros, EvenGroups(weight.group_size))


def _shared(scales: torch.Tensor, zeros: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return scales and zeros [num_weights, outputs, groups] with one row for each block of equal rows."""
    changes = torch.zeros(scales.shape[1] - 1, dtype=torch.bool, device=scales.device)
    for part in (scales, zeros):
        if part is not None:
            changes |= (part[:, 1:] != part[:, :-1]).any(2).any(0)
    size = gcd(scales.shape[1], *(changes.nonzero()[:, 0] + 1).tolist())
    return scales[:, ::size].contiguous(), None if zeros is None else zeros[:, ::size].contiguous()


def _pick(tensor: torch.Tensor, chosen: slice | torch.Tensor) -> torch.Tensor:
    if isinstance(chosen, slice):
        return tensor[chosen]
    if tensor.dtype == torch.float8_e4m3fn:  # not every device indexes float8
        return tensor.view(torch.uint8).index_select(0, chosen).view(tensor.dtype)
    return tensor.index_select(0, chosen)


def _form(weight: KeptWeight) -> tuple[object, ...]:
    return weight.shape, weight.group_size, weight.codes.dtype, weight.scales.dtype


def _is_packed(weight: KeptWeight) -> bool:
    return weight.num_bits == 4 and weight.shape[1] % 2 == 0


def _packed(codes: torch.Tensor, values: Sequence[int] | None) -> torch.Tensor:
    """Return two codes to a byte, each as its place among `values`."""
    if values is not None:
        places = torch.zeros(1 << 8, dtype=torch.uint8, device=codes.device)
        for place, value in enumerate(values):
            places[value % (1 << 8)] = place
        codes = places[codes.view(torch.uint8).to(torch.int32)]
    return codes[:, ::2] << 4 | codes[:, 1::2]


def _pairs(values: Sequence[int]) -> torch.Tensor:
    """Return the values of the two codes in each byte, float32 [256, 2]."""
    each = torch.tensor(values, dtype=torch.float32)
    return torch.stack((each.repeat_interleave(16), each.repeat(16)), dim=1)


def _or_zeros(zeros: torch.Tensor | None, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(scales, dtype=dtype) if zeros is None else zeros.to(dtype)
