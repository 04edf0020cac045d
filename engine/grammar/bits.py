"""Set single bits of a row of allowed tokens."""

import numpy as np

from engine.grammar.interface import Bits


def set_bit(row: Bits, token_id: int, *, allowed: bool) -> None:
    """Set in `row` [ceil(vocab_size / 32)] int32 whether `token_id` is allowed."""
    words = row.view(np.uint32)  # the top bit of an int32 is its sign
    bit = np.uint32(1 << (token_id % 32))
    if allowed:
        words[token_id // 32] |= bit
    else:
        words[token_id // 32] &= ~bit
