"""How a module is tried that runs by a device's ops: on which random rows, and with how much difference allowed."""

from collections.abc import Iterator

import torch

ROWS = 19
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Of the difference's norm over that of what the module makes of its rows."""
_UNSEEN_HEADS = 3


def network_tolerance(dtype: torch.dtype, num_layers: int) -> float:
    """Return how far logits may be off, over their norm: roundings of layers add up as their root does."""
    return float(TOLERANCE[dtype] * (2 * max(1, num_layers)) ** 0.5)


def rows_by_heads(rows: torch.Tensor, seen: torch.Size | None) -> Iterator[torch.Tensor]:
    """Yield rows of heads for a norm, as wide, of the dtype and on the device of its flat `rows`.

    They are [1, ROWS, heads, width], in one piece and as part of a wider product, and turned to
    [1, heads, ROWS, width] where the norm was `seen` to take that. None where it was seen to take flat rows alone.
    """
    if seen is not None and len(seen) != 4:
        return
    width = rows.shape[-1]
    is_turned = seen is not None and seen[2] == ROWS != seen[1]
    heads = _UNSEEN_HEADS if seen is None else seen[1 if is_turned else 2]
    numbers = torch.Generator().manual_seed(1)
    product = torch.randn(1, ROWS, (heads + 2) * width, generator=numbers).to(rows.device, rows.dtype)
    split = product[..., : heads * width].view(1, ROWS, heads, width)
    yield split.contiguous()
    yield split
    if is_turned:
        yield split.transpose(1, 2)
