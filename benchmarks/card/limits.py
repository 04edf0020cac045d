"""The limits of the device: bytes per second of a copy within it, operations per second of a large matrix product."""

from dataclasses import dataclass

import torch

from benchmarks.card.rows import Row, seconds_of
from devices.interface import Device

H200_BYTES_S = 4.3e12
"""Bytes read plus bytes written per second by a copy within an H200, as measured on one: the limit for decoding."""
H200_OPERATIONS_S = 788e12
"""Operations per second of bfloat16 products on an H200, as measured on one."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits called `name`. `copied_bytes_s` counts a copied byte once, `read_bytes_s` its read and its write."""

    name: str
    read_bytes_s: float
    operations_s: float
    copied_bytes_s: float


def measure_limits(device: Device, *, tiny: bool, rounds: int) -> tuple[Limits, list[Row]]:
    """Return the limits of this device, measured now, and their rows."""
    at, num_bytes, size = device.torch_device, (16 << 20) if tiny else (1 << 30), 512 if tiny else 8192
    source = torch.ones(num_bytes, dtype=torch.uint8, device=at)
    target = torch.empty_like(source)
    copy_s = seconds_of(lambda: target.copy_(source), device.synchronize, rounds)
    dtype = torch.float32 if tiny else torch.bfloat16
    left, right = (torch.randn(size, size, device=at).to(dtype) for _ in range(2))
    product_s = seconds_of(lambda: left @ right, device.synchronize, rounds)
    found = Limits("measured here", 2 * num_bytes / copy_s, 2 * size**3 / product_s, num_bytes / copy_s)
    return found, [
        Row(f"copy of {num_bytes >> 20} MiB, read and written", "torch", found.read_bytes_s / 1e9, "GB/s"),
        Row(f"product of {size} x {size} {dtype}", "torch", found.operations_s / 1e12, "TFLOP/s"),
    ]


def h200(measured: Limits) -> Limits:
    """Return the H200's limits, on which the goals are based; the copy's figure is from this run."""
    return Limits("H200", H200_BYTES_S, H200_OPERATIONS_S, measured.copied_bytes_s)
