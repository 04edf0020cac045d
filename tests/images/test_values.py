"""Values that are not finite are found in every type, wherever they stand; numpy and torch are the oracle."""

import numpy as np
import pytest
import torch

from images.values import is_finite


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_only_nan_and_infinity_are_not_finite(dtype: str) -> None:
    kind = getattr(torch, dtype)
    if dtype == "float32":
        patterns = torch.from_numpy(np.random.default_rng(5).integers(0, 2**32, 20_000, np.uint32).view(np.int32))
        edges = torch.tensor([0x7F7FFFFF, 0x7F800000, -0x00800000, 0x7FC00001, 0x7F800001, 0], dtype=torch.int32)
        values = torch.cat([patterns, edges]).view(kind)
    else:
        infinity = torch.tensor(torch.inf, dtype=kind).view(torch.int16)
        edges = torch.cat([infinity + sign + near for sign in (0, -(2**15)) for near in torch.arange(-2, 3)[:, None]])
        values = torch.cat([torch.arange(-(2**15), 2**15, 5), edges]).to(torch.int16).view(kind)
    width, finite = values.element_size(), torch.isfinite(values)
    good, bad = (values[chosen].view(torch.uint8).numpy().tobytes() for chosen in (finite, ~finite))

    for data, expected in ((good, True), (bad, False)):
        single = {is_finite(data[at : at + width], dtype) for at in range(0, len(data), width)}
        assert single == {expected}
    assert is_finite(good, dtype)
    one = bad[:width]
    assert not any(is_finite(data, dtype) for data in (one + good, good + one, good[:400] + one + good[400:]))
