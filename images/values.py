"""Values of embeddings as bytes. Pure: without numpy, which the scheduler does not load."""

from wire.kv_layout import ITEM_BYTES

_HIGH_ONES = {"float32": 0x7F, "bfloat16": 0x7F, "float16": 0x7C}
"""The bits of a value's last byte that are in its exponent."""
_IS_NEXT = bytes(byte >> 7 for byte in range(256))
"""1 where the highest bit is set: in float32 and bfloat16 the byte before the last has the exponent's lowest bit."""


def is_finite(values: bytes, dtype: str) -> bool:
    """Return whether none of the little-endian values is NaN or infinite: all bits of such a value's exponent are 1."""
    width, ones = ITEM_BYTES[dtype], _HIGH_ONES[dtype]
    high = values[width - 1 :: width].translate(bytes(byte & ones == ones for byte in range(256)))
    if dtype == "float16":
        return 1 not in high
    following = values[width - 2 :: width].translate(_IS_NEXT)
    return not int.from_bytes(high, "little") & int.from_bytes(following, "little")
