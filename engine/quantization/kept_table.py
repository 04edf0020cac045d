"""The ways in which linear layers stay quantised, by the names that a device's traits give them.

int4pack, int4pack-host   4-bit weights in groups, by torch's kernel for cards and by its twin for the CPU
int8                      W8A8: int8 weights, inputs rounded token by token
npu-int8, npu-antiquant   W8A8, and 4- or 8-bit weights beside inputs in floats, by torch_npu's ops
"""

from collections.abc import Sequence

from engine.npu.kept_linears import W8A8, AntiquantFormat
from engine.quantization.kept import KeptFormat
from engine.quantization.kept_int4pack import ON_CARD, ON_HOST, Int4Format
from engine.quantization.kept_int8 import BY_TORCH, Int8Format

FORMATS: dict[str, KeptFormat] = {
    "int4pack": Int4Format(ON_CARD),
    "int4pack-host": Int4Format(ON_HOST),
    "int8": Int8Format(BY_TORCH),
    "npu-int8": Int8Format(W8A8),
    "npu-antiquant": AntiquantFormat(),
}


def formats_named(names: Sequence[str]) -> tuple[KeptFormat, ...]:
    """Return those of a device's `kept_linears`, in its order; a name that is not there raises KeyError."""
    return tuple(FORMATS[name] for name in names)
