"""The random rows and the tolerances of a module's comparison with the original."""

from collections.abc import Iterator

import torch

ROWS = 19
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Largest norm of the difference, relative to the norm of the module's output."""
_UNSEEN_HEADS = 3


def network_tolerance(dtype: torch.dtype, num_layers: int) -> float:
    """Return the tolerance of logits, relative to their norm: rounding errors grow with the root of the layers."""
    return float(TOLERANCE[dtype] * (2 * max(1, num_layers)) ** 0.5)


def rows_by_heads(rows: torch.Tensor, seen: torch.Size | None) -> Iterator[torch.Tensor]:
    """Yield random rows split by heads for a norm, with the width, dtype and device of its flat `rows`.

    They are [1, ROWS, heads, width], contiguous and as a slice of a wider product, and transposed to
    [1, heads, ROWS, width] if the norm was `seen` with that shape. Yields nothing if the norm was seen with flat rows.
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
