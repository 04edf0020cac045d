"""From codes and scales to plain weights: one subtraction and one product in float32, then one rounding."""

import torch

from engine.quantization.interface import Grouped

_STRIP_ELEMENTS = 1 << 22  # float32 scratch of 16 MiB and as much for the scales, whatever the weight's size


def dequantise(grouped: Grouped, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight [num_rows, num_columns] in `dtype`.

    Codes of at most 8 bits times a scale of float16 or bfloat16 are exact in float32, so `dtype` rounds once.
    """
    num_rows, num_columns = grouped.codes.shape
    result = torch.empty(num_rows, num_columns, dtype=dtype)
    strip = max(1, _STRIP_ELEMENTS // max(1, num_columns))
    for start in range(0, num_rows, strip):
        rows = slice(start, start + strip)
        values = grouped.codes[rows].to(torch.float32)
        if grouped.zeros is not None:
            values -= grouped.zeros[rows].to(torch.float32)[:, grouped.groups]
        values *= grouped.scales[rows].to(torch.float32)[:, grouped.groups]
        result[rows] = values
    return result
