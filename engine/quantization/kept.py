"""Linear layers that stay quantised on a device: the weight as codes and scales, and its kernel.

module --read_cut--> Grouped --kept_weight--> KeptWeight --KeptFormat.pack--> Kernel (in a KeptLinear)

A format is chosen by the device's traits (kept_table.py) and compared with the dequantised weight on random rows before
use (kept_check.py).
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from engine.quantization.interface import Grouped, StaticInputs
from engine.quantization.kept_cut import even_columns


@dataclass(frozen=True, slots=True)
class KeptWeight:
    """A quantised weight, or the cut of it that a rank has.

        weight[r, c] = (codes[r, c] - zeros[r, c // group_size]) * scales[r, c // group_size]

    `codes` are uint8, int8 or float8 [outputs, inputs]; `scales` [outputs, groups], as stored; `zeros` of the scales'
    shape, in units of the codes, None where all are 0. With act order, columns are sorted by group, and `order` is the
    input of each column (kept_cut.py, EvenColumns). `num_bits` is the width of integer codes.
    `rounded_inputs`: the type to which inputs are rounded token by token, None where they stay floats. `static`: the
    layer rounds its inputs with stored values instead, and its kernel adds the layer's bias too.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_size: int
    order: torch.Tensor | None
    num_bits: int | None
    rounded_inputs: torch.dtype | None
    static: StaticInputs | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.codes.shape[0], self.codes.shape[1]

    def to(self, device: torch.device) -> "KeptWeight":
        """Return a copy on `device`."""
        zeros, order = (None if tensor is None else tensor.to(device) for tensor in (self.zeros, self.order))
        return replace(
            self, codes=self.codes.to(device), scales=self.scales.to(device), zeros=zeros, order=order,
            static=None if self.static is None else self.static.to(device),
        )  # fmt: skip

    @property
    def code_type(self) -> str:
        """Description of its codes, such as "4-bit codes"."""
        if self.num_bits is None:
            return f"{str(self.codes.dtype).removeprefix('torch.')} codes"
        is_w8a8 = self.static is not None or self.codes.dtype == self.rounded_inputs
        return f"{self.num_bits}-bit codes" + " of W8A8" * is_w8a8


class Kernel(Protocol):
    """Computes with one packed weight. Owns its tensors."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        ...

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [num_rows, outputs] of [num_rows, inputs], in the rows' dtype."""
        ...


class KeptFormat(Protocol):
    """A method by which a device computes with quantised weights."""

    @property
    def rounds_inputs(self) -> bool:
        """Whether inputs are rounded to the type of the codes."""
        ...

    def handles(self, weight: KeptWeight) -> bool:
        """Return whether it handles this type of codes."""
        ...

    def lacking(self, weight: KeptWeight, dtype: torch.dtype) -> str | None:
        """Return why it cannot compute with this weight and rows of `dtype`, or None if it can."""
        ...

    def pack(self, weight: KeptWeight, dtype: torch.dtype) -> Kernel:
        """Return the kernel. Raises RuntimeError, as torch does, if the device refuses."""
        ...

    def deviation(self, weight: KeptWeight, rows: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
        """Return [outputs]: the error that rounding weights and inputs may cause in an output of random rows.

        `rows` are standard normal, in the layer's dtype; `norms` [outputs] are the Euclidean norms of the weight's
        rows. The standard deviation of an output is the norm of its row of the weight; the value returned is an upper
        bound on the standard deviation of the output's error.
        """
        ...


class KeptLinear(nn.Module):
    """A linear layer whose weight stays quantised; inference only. `order` sorts the inputs if the kernel's are sorted.

    It has the bias of `linear`, and its hooks, which sum over the ranks. The kernel's tensors are not parameters or
    buffers, so nothing moves, casts or initialises them.
    """

    def __init__(
        self, linear: nn.Linear, kernel: Kernel, order: torch.Tensor | None, *, rounds_inputs: bool = False
    ) -> None:  # fmt: skip
        super().__init__()
        self.rounds_inputs = rounds_inputs
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias: nn.Parameter | None = linear.bias
        self._forward_hooks.update(linear._forward_hooks)
        self._kernel, self._order = kernel, order
        self._is_padded = order is not None and len(order) > linear.in_features

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight, scales and zeros included."""
        return self._kernel.num_bytes + (0 if self._order is None else self._order.nbytes)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [..., out_features] of [..., in_features]."""
        product = self.product(rows.reshape(-1, self.in_features))
        if self.bias is not None:
            product = product + self.bias
        return product.reshape(*rows.shape[:-1], self.out_features)

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [num_rows, out_features] of [num_rows, in_features], without the bias."""
        if self._order is None:
            return self._kernel(rows)
        return self._kernel((nn.functional.pad(rows, (0, 1)) if self._is_padded else rows).index_select(1, self._order))


def kept_weight(grouped: Grouped, *, rounded_inputs: torch.dtype | None) -> KeptWeight | str:
    """Return a weight, or a rank's cut of it, in the form that formats need, or the reason why none can use it.

    `rounded_inputs` is the type to which the checkpoint rounds inputs, for layers that are not static.
    """
    columns = even_columns(grouped)
    if isinstance(columns, str):
        return columns
    codes, scales = columns.arranged(grouped.codes), grouped.scales[:, columns.groups]
    zeros = None if grouped.zeros is None or not grouped.zeros.any() else grouped.zeros[:, columns.groups]
    by_token = None if grouped.static is not None else rounded_inputs
    return KeptWeight(
        codes, scales, zeros, columns.size, columns.order, _num_bits(codes), by_token, grouped.static
    )  # fmt: skip


def _num_bits(codes: torch.Tensor) -> int | None:
    """Return the width that integer codes need, at least 4: 2 and 3 bits count as 4."""
    if codes.is_floating_point():
        return None
    return 4 if codes.dtype == torch.uint8 and int(codes.max()) < 16 else 8
