"""Vectors as bytes: torch, which vLLM uses, is the reference."""

import math
import sys

import pytest
import torch

from scheduler.api.vector_bytes import BYTES_OF, EmbedDtype, Endianness, to_bytes

TORCH: dict[EmbedDtype, torch.dtype] = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
}  # fmt: skip


def values() -> list[float]:
    """Random numbers of all sizes, those in the middle between two, zeros, and those beyond the largest."""
    drawn = torch.randn(5_000, generator=torch.manual_seed(3)) * torch.logspace(-6, 3, 5_000)
    eighths = torch.arange(-512, 512) / 8
    ends = torch.tensor([0.0, -0.0, 448.0, 464.0, 465.0, 57_344.0, 61_440.0, 61_441.0, 65_519.0, 65_520.0, 1e30, -1e30])
    return [float(one) for one in torch.cat([drawn, eighths, ends, torch.tensor([math.inf, -math.inf])])]


@pytest.mark.parametrize("dtype", BYTES_OF)
def test_each_dtype_is_rounded_as_by_torch(dtype: EmbedDtype) -> None:
    given = values()
    wanted = torch.tensor(given).to(TORCH[dtype])

    found = torch.frombuffer(bytearray(to_bytes(given, dtype, "native")), dtype=TORCH[dtype])

    assert found.element_size() == BYTES_OF[dtype]
    same = (found.float() == wanted.float()) | (found.float().isnan() & wanted.float().isnan())
    assert [(given[at], found[at].item(), wanted[at].item()) for at in (~same).nonzero().flatten().tolist()] == []


@pytest.mark.parametrize("dtype", BYTES_OF)
def test_the_byte_order_is_the_requested_one(dtype: EmbedDtype) -> None:
    given, size = [0.1, -2.5, 3.0], BYTES_OF[dtype]
    native: Endianness = sys.byteorder
    other: Endianness = "big" if native == "little" else "little"
    written = to_bytes(given, dtype, "native")

    swapped = b"".join(written[at : at + size][::-1] for at in range(0, len(written), size))

    assert to_bytes(given, dtype, native) == written
    assert to_bytes(given, dtype, other) == swapped
