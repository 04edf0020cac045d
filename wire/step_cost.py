"""What a step costs, as the engine measures it: engines size chunks by this cost, and placement compares paths."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: `base_s`, plus `sequence_s` for each sequence decoded, plus `token_s` for each chunk token.

    `token_s` is 0 until a chunk was measured, the others until a sequence was decoded.
    """

    base_s: float = 0.0
    sequence_s: float = 0.0
    token_s: float = 0.0

    def decode_s(self, num_sequences: float) -> float:
        """Return the seconds of a step that decodes this many sequences."""
        return self.base_s + num_sequences * self.sequence_s

    def chunk_within(self, limit_s: float, num_sequences: int, least: int) -> float:
        """Return the prompt tokens that fit into a step of `limit_s` beside the sequences it decodes, `least` or more.

        Infinity while a token's cost is not known.
        """
        if not self.token_s:
            return math.inf
        return max(least, (limit_s - self.decode_s(num_sequences)) // self.token_s)


NO_COST = StepCost()
"""Nothing was measured yet."""
