"""Small unsigned integers packed in int32 words: a little-endian stream of bits, field k at bits [k*b, (k+1)*b).

Words are little-endian in the file and in memory. With 2, 4 and 8 bits a word holds 32/b fields; with 3 bits fields
cross words, and 32 of them take 3 words.
"""

from math import gcd

import torch

WORD_BITS = 32
_BYTE_BITS = 8


def fields_per_period(bits: int) -> int:
    """Return the smallest number of fields that fill whole words."""
    return WORD_BITS // gcd(WORD_BITS, bits)


def covering(fields: range, bits: int) -> tuple[range, range]:
    """Return the words that contain `fields`, in whole periods, and the range of `fields` in the unpacked words."""
    period = fields_per_period(bits)
    first, last = fields.start // period, -(-fields.stop // period)
    words_per_period = period * bits // WORD_BITS
    words = range(first * words_per_period, last * words_per_period)
    return words, range(fields.start - first * period, fields.stop - first * period)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the fields of the last dimension: int32 [..., num_words] -> uint8 [..., num_words * 32 / bits]."""
    if _BYTE_BITS % bits == 0:  # fields do not cross bytes; shifting bytes reads less memory than shifting words
        octets = words.reshape(-1).view(torch.uint8).reshape(*words.shape[:-1], -1)
        mask = (1 << bits) - 1
        return torch.stack([(octets >> shift) & mask for shift in range(0, _BYTE_BITS, bits)], dim=-1).flatten(-2)
    period = fields_per_period(bits)
    periods = words.reshape(*words.shape[:-1], -1, period * bits // WORD_BITS)  # [..., num_periods, words_per_period]
    return torch.stack([_field(periods, k * bits, bits) for k in range(period)], dim=-1).flatten(-2)


def _field(periods: torch.Tensor, start: int, bits: int) -> torch.Tensor:
    """Return bits [start, start + bits) of each period, masked: the shift of a negative word is arithmetic."""
    word, offset = divmod(start, WORD_BITS)
    low = min(bits, WORD_BITS - offset)
    value = (periods[..., word] >> offset) & ((1 << low) - 1)
    if low < bits:
        value = value | (periods[..., word + 1] & ((1 << (bits - low)) - 1)) << low
    return value.to(torch.uint8)
