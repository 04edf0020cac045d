"""4-bit weights in groups by torch's int4pack kernel, which converts codes to its float dtype as it multiplies.

codes [outputs, inputs] -> packed in the kernel's order    scales_and_zeros [groups, outputs, 2], in that dtype
weight = (code - 8) * scale + zero, so that zero = (8 - the layout's zero) * scale
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from engine.quantization.kept import KeptWeight, Kernel

GROUP_SIZES = (32, 64, 128, 256)
_MIDDLE = 8
_TILE = 16
_INNER_TILES = (8, 4, 2)
_STRIP = 1024  # outputs unpacked at a time: a multiple of 8
MANY_ROWS = 256
"""From this many rows on, a GPU dequantises the weight first: the kernel rereads it for every 16 rows. The best value
has never been measured."""


@dataclass(frozen=True, slots=True)
class Int4Ops:
    """The kernel's ops on one type of device.

    `arrange` converts codes (uint8, below 16) to the input of `pack`, which also needs the number of inner tiles;
    `unpack` converts packed outputs back to codes [outputs, inputs], where the order is known. `dtypes` maps the dtype
    of rows to that of the product. A weight's outputs must be a multiple of `outputs`, its inputs one of `inputs`.
    """

    arrange: Callable[[torch.Tensor], torch.Tensor]
    pack: Callable[[torch.Tensor, int], torch.Tensor]
    multiply: Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor], torch.Tensor]
    dtypes: Mapping[torch.dtype, torch.dtype]
    outputs: int
    inputs: int
    unpack: Callable[[torch.Tensor], torch.Tensor] | None = None


def _two_to_a_byte(codes: torch.Tensor) -> torch.Tensor:
    """Return [outputs, inputs / 2] uint8: of two neighbours the first is in the high half."""
    return (codes[:, ::2] << 4 | codes[:, 1::2]).contiguous()


def _from_tiles(packed: torch.Tensor) -> torch.Tensor:
    """Return codes int32 [outputs, inputs] of a GPU's [outputs / 8, tiles of inputs, 32 lanes, words] int32.

    A word is two neighbouring tiles of 8 outputs x 16 inputs. Lane 4 o + q contains, for output o and each tile, the
    inputs 2 q + 8 p + h with p and h 0 or 1; its fields, lowest first, are (h, tile, p) = 000, 001, 010, ...
    """
    num_blocks, num_tiles, _, num_words = packed.shape
    shifts = torch.arange(0, 32, 4, device=packed.device, dtype=torch.int32)
    fields = packed[..., None] >> shifts & 15  # [blocks, tiles, 32, words, 8]
    fields = fields.view(num_blocks, num_tiles, 8, 4, num_words, 2, 2, 2)  # ..., output, q, word, h, tile, p
    return fields.permute(0, 2, 1, 4, 6, 7, 3, 5).reshape(num_blocks * 8, -1)


ON_CARD = Int4Ops(
    _two_to_a_byte, torch.ops.aten._convert_weight_to_int4pack, torch.ops.aten._weight_int4pack_mm,
    dtypes={torch.bfloat16: torch.bfloat16, torch.float16: torch.bfloat16}, outputs=8, inputs=32, unpack=_from_tiles,
)  # fmt: skip
ON_HOST = Int4Ops(
    lambda codes: codes.to(torch.int32), torch.ops.aten._convert_weight_to_int4pack_for_cpu,
    torch.ops.aten._weight_int4pack_mm_for_cpu,
    dtypes={dtype: dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}, outputs=16, inputs=32,
)  # fmt: skip
"""On the CPU: the same arithmetic in another packing order, for tests without a GPU."""


@dataclass(frozen=True, slots=True)
class Int4Kernel:
    """Implements Kernel."""

    ops: Int4Ops
    packed: torch.Tensor
    scales_and_zeros: torch.Tensor
    group_size: int

    @property
    def num_bytes(self) -> int:
        """See Kernel."""
        return self.packed.nbytes + self.scales_and_zeros.nbytes

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """See Kernel."""
        inner = rows.to(self.scales_and_zeros.dtype).contiguous()
        if self.ops.unpack is not None and len(rows) >= MANY_ROWS:
            return torch.nn.functional.linear(inner, self._floats(self.ops.unpack)).to(rows.dtype)
        return self.ops.multiply(inner, self.packed, self.group_size, self.scales_and_zeros).to(rows.dtype)

    def _floats(self, unpack: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the dequantised weight [outputs, inputs] for one product, rounded once."""
        num_groups, outputs, _ = self.scales_and_zeros.shape
        made = torch.empty(
            outputs, num_groups * self.group_size, dtype=self.scales_and_zeros.dtype, device=self.packed.device
        )  # fmt: skip
        for start in range(0, outputs, _STRIP):
            span = slice(start, start + _STRIP)
            codes = unpack(self.packed[start // 8 : (start + _STRIP) // 8]).to(torch.float32)
            scales, zeros = self.scales_and_zeros[:, span].to(torch.float32).permute(2, 1, 0)[..., None]
            made[span] = ((codes - _MIDDLE).view(len(codes), num_groups, -1) * scales + zeros).flatten(1)
        return made


@dataclass(frozen=True, slots=True)
class Int4Format:
    """Implements KeptFormat."""

    ops: Int4Ops

    @property
    def rounds_inputs(self) -> bool:
        """See KeptFormat."""
        return False

    def handles(self, weight: KeptWeight) -> bool:
        """See KeptFormat."""
        return weight.num_bits == 4

    def lacking(self, weight: KeptWeight, dtype: torch.dtype) -> str | None:
        """See KeptFormat."""
        outputs, inputs = weight.shape
        ops = self.ops
        if dtype not in ops.dtypes:
            return f"int4pack supports {', '.join(map(_name, ops.dtypes))}, not {_name(dtype)}"
        if weight.group_size not in GROUP_SIZES:
            return f"int4pack supports groups of {', '.join(map(str, GROUP_SIZES))} inputs, not {weight.group_size}"
        if outputs % ops.outputs or inputs % ops.inputs:
            return f"int4pack supports multiples of {ops.outputs} x {ops.inputs}, not {outputs} x {inputs}"
        return None

    def pack(self, weight: KeptWeight, dtype: torch.dtype) -> Kernel:
        """See KeptFormat."""
        inner = next(tiles for tiles in _INNER_TILES if weight.shape[1] % (tiles * _TILE) == 0)
        packed = self.ops.pack(self.ops.arrange(weight.codes), inner)
        return Int4Kernel(self.ops, packed, _scales_and_zeros(weight, self.ops.dtypes[dtype]), weight.group_size)

    def deviation(self, weight: KeptWeight, rows: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
        """See KeptFormat.

        Scale, zero and their sum are rounded, each by at most u (the unit roundoff) times its size. For scale and zero
        that is u (|code - 8| + |8 - zero|) scale, at most 16 u scale; for the sum, u |weight|. Rows of another dtype
        are rounded to the kernel's: u |weight| again.
        """
        inner = self.ops.dtypes[rows.dtype]
        unit = torch.finfo(inner).eps / 2
        of_scales = weight.scales.float().square().sum(1).mul(weight.group_size).sqrt()
        return unit * (2 * _MIDDLE * of_scales + (1 if inner == rows.dtype else 2) * norms)


def _scales_and_zeros(weight: KeptWeight, dtype: torch.dtype) -> torch.Tensor:
    scales = weight.scales.float()
    zeros = torch.zeros_like(scales) if weight.zeros is None else weight.zeros.float()
    both = torch.stack((scales, (_MIDDLE - zeros) * scales), dim=-1)  # [outputs, groups, 2]
    return both.transpose(0, 1).to(dtype).contiguous()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
