"""Numbers as bytes, in the dtype and byte order that a client requests. Pure."""

import math
import struct
import sys
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from typing import Literal

EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "little", "big"]

BYTES_OF: dict[EmbedDtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
_MAX_FLOAT16 = 65_520.0  # rounds to infinity from here on


def to_bytes(values: Sequence[float], dtype: EmbedDtype, order: Endianness) -> bytes:
    """Return the values, rounded to the nearest of the dtype (ties to even), one after another."""
    written = _written(values, dtype)
    if order not in ("native", sys.byteorder):
        written.byteswap()
    return written.tobytes()


def _written(values: Sequence[float], dtype: EmbedDtype) -> "array[float] | array[int]":
    if dtype == "float32":
        return array("f", values)
    if dtype == "float16":
        return array("H", struct.pack(f"={len(values)}e", *map(_in_float16, values)))
    if dtype == "bfloat16":
        return array("H", [_bfloat16(bits) for bits in array("I", array("f", values).tobytes())])
    codes = _codes(*((4, 3) if dtype == "fp8_e4m3" else (5, 2)))
    return array("B", [_nearest(codes, value) for value in values])


def _in_float16(value: float) -> float:
    return math.copysign(math.inf, value) if abs(value) >= _MAX_FLOAT16 else value


def _bfloat16(bits: int) -> int:
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF


@cache
def _codes(num_exponent: int, num_mantissa: int) -> list[float]:
    """Return the values of the codes from 0: in E4M3 up to the largest number, in E5M2 up to infinity (OCP's FP8)."""
    bias, last = 2 ** (num_exponent - 1) - 1, {4: 0x7E, 5: 0x7C}[num_exponent]
    found = []
    for code in range(last + 1):
        exponent, mantissa = code >> num_mantissa, code & (1 << num_mantissa) - 1
        fraction = mantissa / (1 << num_mantissa) + (exponent > 0)
        found.append(math.ldexp(fraction, max(exponent, 1) - bias))
    return found


def _nearest(codes: list[float], value: float) -> int:
    """Return the code of the nearest value; beyond the largest it is the last code, as in torch."""
    size, sign = abs(value), 0x80 if math.copysign(1, value) < 0 else 0
    if math.isnan(size):
        return sign | 0x7F
    above = min(bisect_left(codes, size), len(codes) - 1)
    if above == 0 or size >= codes[above]:
        return sign | above
    up, down = codes[above] - size, size - codes[above - 1]
    return sign | (above if up < down or (up == down and above % 2 == 0) else above - 1)
