"""torch's int4pack kernel for CUDA by the rules of its source, in plain arithmetic: its layout and its refusals."""

import torch

_LANES = 32


class CardInt4:
    """Stands in for torch.ops.aten._convert_weight_to_int4pack and _weight_int4pack_mm of a card; counts products."""

    def __init__(self) -> None:
        self.num_products = 0

    def pack(self, codes: torch.Tensor, inner_tiles: int) -> torch.Tensor:
        """Return int32 [outputs / 8, inputs / (16 * inner_tiles), 32, inner_tiles / 2] of bytes [outputs, inputs / 2].

        Tiles are 8 outputs x 16 inputs; lane l holds output l // 4 and, of each tile, inputs 2 (l % 4) + (0, 1, 8, 9).
        A word is two neighbouring tiles: their even inputs in its low half, their odd ones in its high half.
        """
        assert codes.dtype == torch.uint8
        assert codes.dim() == 2
        assert codes.is_contiguous()
        assert inner_tiles in (2, 4, 8)
        outputs, inputs = codes.shape[0], codes.shape[1] * 2
        assert inputs % (inner_tiles * 16) == 0
        wide = torch.stack((codes >> 4, codes & 15), dim=2).flatten(1).to(torch.int64)
        assert outputs % 8 == 0
        tiles = wide.view(outputs // 8, 8, inputs // (inner_tiles * 16), inner_tiles // 2, 2, 16)
        words = torch.zeros(outputs // 8, inputs // (inner_tiles * 16), _LANES, inner_tiles // 2, dtype=torch.int64)
        for lane in range(_LANES):
            for field in range(8):
                half, place = divmod(field, 4)
                tile, pair = divmod(place, 2)
                column = 2 * (lane % 4) + 8 * pair + half
                words[:, :, lane] |= tiles[:, lane // 4, :, :, tile, column] << (4 * field)
        return words.to(torch.uint32).view(torch.int32)

    def multiply(
        self, rows: torch.Tensor, packed: torch.Tensor, group_size: int, scales_and_zeros: torch.Tensor
    ) -> torch.Tensor:
        """Return bfloat16 [num_rows, outputs] of bfloat16 [num_rows, inputs]."""
        self.num_products += 1
        assert rows.dtype == torch.bfloat16
        assert rows.dim() == 2
        assert rows.is_contiguous()
        assert packed.dtype == torch.int32
        assert packed.is_contiguous()
        assert packed.dim() == 4
        assert packed.shape[2] == _LANES
        inner_tiles = packed.shape[3] * 2
        assert inner_tiles in (2, 4, 8)
        outputs, inputs = packed.shape[0] * 8, rows.shape[1]
        assert packed.shape[1] * inner_tiles * 16 == inputs
        assert group_size in (32, 64, 128, 256)
        assert scales_and_zeros.shape == (inputs // group_size, outputs, 2)
        assert inputs % group_size == 0
        assert scales_and_zeros.dtype == torch.bfloat16
        codes = self._codes(packed, outputs, inputs, inner_tiles).float() - 8
        scales, zeros = (part.t().float() for part in scales_and_zeros.unbind(2))  # [outputs, groups]
        groups = torch.arange(inputs) // group_size
        weight = (codes * scales[:, groups] + zeros[:, groups]).bfloat16()  # one rounding, as of a fused multiply-add
        return (rows.float() @ weight.float().t()).bfloat16()

    def _codes(self, packed: torch.Tensor, outputs: int, inputs: int, inner_tiles: int) -> torch.Tensor:
        shape = (outputs // 8, 8, inputs // (inner_tiles * 16), inner_tiles // 2, 2, 16)
        tiles = torch.full(shape, -1, dtype=torch.int64)
        words = packed.view(torch.uint32).to(torch.int64)
        for lane in range(_LANES):
            for field in range(8):
                half, place = divmod(field, 4)
                tile, pair = divmod(place, 2)
                tiles[:, lane // 4, :, :, tile, 2 * (lane % 4) + 8 * pair + half] = words[:, :, lane] >> 4 * field & 15
        assert not (tiles < 0).any()
        return tiles.reshape(outputs, inputs)
